"""What Gemma 3n and 4 have beside the stream of other decoders."""

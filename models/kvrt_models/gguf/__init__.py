"""GGUF files: header, tensors, and the decoder that a header describes."""

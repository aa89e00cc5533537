"""Text to token ids and back, from GGUF metadata and from tokenizer.json."""

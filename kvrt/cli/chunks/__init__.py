"""Chunks: texts that were computed alone, from files to keys and values."""

"""Decoders, their files and their tokenizers; they call kvrt's attention and never see a cache."""

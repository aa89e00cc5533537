"""Hugging Face folders: config.json, safetensors, and the decoder that they describe."""

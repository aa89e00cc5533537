"""Sections of llama.cpp's session files: cells, keys and values of one of its caches."""

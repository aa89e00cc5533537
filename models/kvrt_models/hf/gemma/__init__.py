"""Gemma 3n and 4, whose layers differ in more than a window."""

"""Blocks: which block of rows a token goes to, and which blocks are worth keeping."""

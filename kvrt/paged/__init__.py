"""Blocks: which block a token goes to, and which blocks are worth keeping."""

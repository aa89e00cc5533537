"""Paged mode on the host: which block a token goes to, and which blocks stay cached."""

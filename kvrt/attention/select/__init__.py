"""Sparse reads: labels beside keys, units chosen by them, and attention over those."""

"""Cached keys and values in blocks, recurrent states, and the rotation of keys."""

"""Rows of K and V, and the rotation of keys."""

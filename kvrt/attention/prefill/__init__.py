"""Attention of a prompt on any XLA device."""

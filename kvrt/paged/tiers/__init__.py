"""Blocks beyond the device: in the host's memory, and on a disk."""

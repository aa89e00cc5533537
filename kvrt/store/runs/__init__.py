"""Runs of cells in an engine's blocks that share scales by channel."""

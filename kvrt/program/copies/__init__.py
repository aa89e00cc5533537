"""Copies of cells that are made a block at a time."""

"""Flags: their definitions, how they are parsed, and what they mean."""

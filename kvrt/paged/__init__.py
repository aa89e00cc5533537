"""Blocks: which block a token goes to, and which blocks are worth keeping."""

from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Hit

__all__ = ["Chain", "Hit"]

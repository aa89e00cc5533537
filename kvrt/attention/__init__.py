"""Attention over the rows of a store, by positions and owners."""

from kvrt.attention.attend import attend
from kvrt.attention.contract import Attend, Decoder

__all__ = ["Attend", "Decoder", "attend"]

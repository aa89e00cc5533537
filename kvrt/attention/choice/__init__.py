"""Which implementation of attention `"auto"` is, and why."""

from kvrt.attention.choice.decide import AttentionChoice, choose

__all__ = ["AttentionChoice", "choose"]

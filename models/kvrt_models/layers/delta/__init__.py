"""Layers of the gated delta rule: the recurrence of one token, of many, and the mixer."""

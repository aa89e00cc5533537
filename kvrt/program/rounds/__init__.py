"""Rounds of speculative decoding on the device; see `kvrt/drafts` for where drafts come from."""

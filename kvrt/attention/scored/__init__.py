"""Layers whose kv heads keep the tokens that a policy scores highest, each head its own."""

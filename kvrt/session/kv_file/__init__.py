"""Sessions in a single `.kv` file."""

"""Sessions in and out of the prefix cache of an engine."""

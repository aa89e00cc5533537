"""A folder of sessions, and its index."""

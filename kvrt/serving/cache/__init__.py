"""The two caches of an engine: in cells, and in blocks."""

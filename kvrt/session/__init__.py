"""Sessions: files that hold a cache and refuse to be taken for another."""

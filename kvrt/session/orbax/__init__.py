"""Sessions in a folder, with keys and values in an Orbax checkpoint."""

"""The cell cache on host and device, kept in step."""

"""Compiled programs in files that a start finds before it traces anything."""

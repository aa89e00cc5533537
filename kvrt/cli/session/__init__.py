"""The commands that work on session files."""

"""The commands that work on folders of sessions."""

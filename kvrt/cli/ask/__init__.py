"""Questions after a session, or after chunks of text."""

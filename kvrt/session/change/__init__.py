"""Sessions made of sessions: trimmed, converted, replaced."""

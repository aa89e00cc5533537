"""Sessions made of sessions: trimmed, converted, repaired, replaced."""

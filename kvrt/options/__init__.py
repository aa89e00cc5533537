"""What users choose, each option once: its default, limits, help, flag, key and digest."""

"""Which requests the next step serves, and with how many of their tokens."""

"""Which layers share a block table, and how many blocks there are."""

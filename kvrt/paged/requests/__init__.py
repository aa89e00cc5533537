"""The blocks of requests: their tables, and what is kept for them."""

"""Products with few tokens on CPU as sums that XLA vectorizes."""

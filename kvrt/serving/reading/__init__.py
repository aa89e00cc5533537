"""What a step's sequences read of the cache, and what of it once for several of them."""

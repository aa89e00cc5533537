"""One conversation, or a few: `Runtime`, and how its tokens are generated."""

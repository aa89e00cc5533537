"""Which cached tokens serve a new prompt: plans, and nothing that runs them."""

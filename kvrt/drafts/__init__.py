"""Where drafts come from that a model then verifies: speculative decoding, on the host."""

"""What families share: the reading of headers, rotations, kinds of layers, and the registry."""

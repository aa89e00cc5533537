"""Keys and values that the devices of a mesh hold, and how a folder keeps them."""

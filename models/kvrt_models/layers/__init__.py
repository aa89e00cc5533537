"""What a decoder is made of: its layers' arithmetic, and the names and shapes of weights."""

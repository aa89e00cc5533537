"""What a step's layers and tokens have."""

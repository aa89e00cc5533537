"""What a model's weights are in memory and on disk."""

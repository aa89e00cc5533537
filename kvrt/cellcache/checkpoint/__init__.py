"""Context checkpoints: where a sequence can be cut back to beside its newest tokens."""

"""Context checkpoints of an engine: windows and states of prompts that hits can end with."""

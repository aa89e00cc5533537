"""The commands that read and continue a prompt: run, prefill."""

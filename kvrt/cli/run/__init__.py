"""The commands that generate: run, ask, prefill."""

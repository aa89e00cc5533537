"""Texts computed alone, blended into prompts, and where they are kept."""

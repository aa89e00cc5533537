"""Beam search over requests that are being served."""

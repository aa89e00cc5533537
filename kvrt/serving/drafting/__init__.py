"""Drafts of requests that are being served, verified in the steps that decode."""

"""From flags to a model, its cache and a runtime."""

"""Many requests on one cache: the engine, its scheduler and its metrics."""

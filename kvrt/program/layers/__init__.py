"""A step in several programs, of which equal layers share one."""

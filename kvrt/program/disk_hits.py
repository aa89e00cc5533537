"""Which programs JAX took from its persistent cache of compiled programs."""

import threading
from collections.abc import Callable

import jax

_HIT = "/jax/compilation_cache/cache_hits"

# Called with programs that are compiled, of how many, and how many of them came from the disk.
CompileProgress = Callable[[int, int, int], None]


class DiskHits:
    """Counts the programs that this thread takes from the disk while it is entered."""

    def __init__(self) -> None:
        """Counts nothing yet."""
        self.n = 0
        self._thread = threading.get_ident()

    def __enter__(self) -> "DiskHits":
        """Listens to JAX."""
        jax.monitoring.register_event_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Listens no more."""
        jax.monitoring.unregister_event_listener(self._note)

    def _note(self, event: str, **_: object) -> None:
        self.n += event == _HIT and threading.get_ident() == self._thread

"""JAX's persistent cache of compiled programs: where it lies, and what was taken from it.

`serialized/` keeps programs beside it that a start finds without tracing.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from kvrt.errors import UsageError
from kvrt.files.cache_folder import private_folder
from kvrt.program.serialized.program_file import keep_beside

_HIT = "/jax/compilation_cache/cache_hits"

# Called with programs that are compiled, of how many, and how many of them came from the disk.
CompileProgress = Callable[[int, int, int], None]


def keep_programs() -> Path:
    """Keeps compiled programs in the cache folder, as the command does, so that starts are quick.

    This is JAX's persistent compilation cache, one for all programs of the process, so it is never
    turned on without a call. A folder that was chosen before, by `JAX_COMPILATION_CACHE_DIR` or
    `jax.config`, stays as it is, with its thresholds. `JAX_ENABLE_COMPILATION_CACHE=0` turns the
    cache off, for the command as well.

    Returns:
      The folder.

    Raises:
      UsageError: the cache folder cannot be used, or others may write to it: programs that are read
        from it are run.
    """
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if chosen:
        return Path(chosen)
    try:
        folder = private_folder("xla")
    except (OSError, UsageError) as error:
        raise UsageError(
            f"compiled programs are not kept ({error}); set KVRT_CACHE to a folder of your own"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # What was compiled before this call made JAX forget to look.
    compilation_cache.reset_cache()
    keep_beside(folder)
    return folder


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

"""Writes arrays as an Orbax checkpoint: one exception where it fails, and no output of Orbax's own.

Orbax closes its event loops while other arrays are still being written. What they report later ends
in tracebacks on standard error, and a writer that goes on makes files again that were removed. So
its loops wait here for what they have begun.
"""

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_S = 60.0  # for arrays that are being written when another one has failed
_ONE_AT_A_TIME = threading.Lock()
_LAYOUT: dict[str, Any] = {"use_ocdbt": True, "use_zarr3": False}
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def write_checkpoint(path: Path, tree: dict[str, Any]) -> None:
    """Writes a checkpoint; nothing of it is being written any more where this raises.

    Raises:
      OSError: the system refuses.
      Exception: of many kinds, whatever else Orbax and TensorStore say of a disk.
    """
    # Two seconds of imports that no other session needs; the layout is what `child` reads.
    import orbax.checkpoint as ocp

    with _quiet(), ocp.PyTreeCheckpointer(**_LAYOUT) as writer:
        writer.save(path.absolute(), tree)


def write_own_shards(path: Path, tree: dict[str, Any]) -> None:
    """Writes of arrays of JAX what the devices of this process hold, the first copy alone.

    Other processes write theirs elsewhere, and none waits for another here. Raises as above.
    """
    import jax
    import orbax.checkpoint as ocp

    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"kvrt-{me}"
    )
    # Every shard goes whole to one checkpoint: that of the process which has its first copy.
    arrays = ocp.type_handlers.ArrayHandler(primary_host=me, use_replica_parallel=False)
    handler = ocp.PyTreeCheckpointHandler(
        **_LAYOUT,
        multiprocessing_options=options,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )
    with _quiet(), ocp.Checkpointer(handler, multiprocessing_options=options) as writer:
        writer.save(path.absolute(), tree)


@contextlib.contextmanager
def told_by_system() -> Iterator[None]:
    """Turns whatever Orbax and TensorStore say of a disk into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # TensorStore has one kind for all that a disk refuses
        if found := _OS_ERROR.search(str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
        raise OSError(0, " ".join(str(error).split())[-200:]) from error


class _Waiting(asyncio.SelectorEventLoop):
    """A loop that ends after what it has begun, not before."""

    def close(self) -> None:
        if not self.is_closed() and not self.is_running():
            left = asyncio.all_tasks(self)
            if left:
                self.run_until_complete(asyncio.wait(left, timeout=_MOST_S))
        super().close()


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _Waiting()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Gives Orbax such loops, and keeps what it logs; both are settings of the whole process."""
    log = logging.getLogger("absl")
    with _ONE_AT_A_TIME:
        before = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(_Policy())
        log.addFilter(_is_of_others)
        try:
            yield
        finally:
            log.removeFilter(_is_of_others)
            asyncio.set_event_loop_policy(before)


def _is_of_others(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname

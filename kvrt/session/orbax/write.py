"""Writes arrays as an Orbax checkpoint: one exception where it fails, and no output of Orbax's own.

Orbax closes its event loops while other arrays are still being written. What they report later ends
in tracebacks on standard error, and a writer that goes on makes files again that were removed. So
its loops wait here for what they have begun.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_S = 60.0  # for arrays that are being written when another one has failed
_ONE_AT_A_TIME = threading.Lock()


def write_checkpoint(path: Path, tree: dict[str, Any]) -> None:
    """Writes a checkpoint; nothing of it is being written any more where this raises.

    Raises:
      OSError: the system refuses.
      Exception: of many kinds, whatever else Orbax and TensorStore say of a disk.
    """
    # Two seconds of imports that no other session needs; the layout is what `child` reads.
    import orbax.checkpoint as ocp

    with _quiet(), ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=False) as writer:
        writer.save(path.absolute(), tree)


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

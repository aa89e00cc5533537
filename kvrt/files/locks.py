"""Locks across processes, on systems with `fcntl` and on those without.

Where there is one, the folder or the file itself is locked and no file is left for it. Elsewhere it
is filelock's lock on a hidden file beside it. A process that dies gives its locks back in both.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from filelock import FileLock, ReadWriteLock, Timeout

# Between two tries. A lock that several processes want is free for a tenth of a millisecond.
_PAUSE_S = 0.001
_MODE = 0o600


@contextlib.contextmanager
def locked_folder(folder: Path, name: str, *, shared: bool, timeout_s: float) -> Iterator[None]:
    """Holds a folder with others that share it, or alone.

    Args:
      folder: that is there.
      name: of what is locked in it, where a file has to stand for the lock.
      shared: with others.
      timeout_s: to wait for it.

    Raises:
      TimeoutError: others have had it for longer.
      OSError: the system refuses.
    """
    fcntl = _fcntl()
    if fcntl is None:
        lock = ReadWriteLock(folder / f".{name}.lock", is_singleton=False)
        wait = lock.read_lock if shared else lock.write_lock
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(wait(timeout_s))
            except Timeout as error:
                raise TimeoutError(str(error)) from error
            yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        end = time.monotonic() + timeout_s
        while not _try(fcntl, handle, kind):
            if time.monotonic() > end:
                raise TimeoutError(f"{folder} is locked by others")
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(handle)


def lock_file(fd: int, path: Path) -> Callable[[], None] | None:
    """Keeps others from a file that is open; does not wait.

    Args:
      fd: of the file.
      path: of the file.

    Returns:
      What is called after the file was closed; None if another process has the lock.

    Raises:
      OSError: the system refuses.
    """
    fcntl = _fcntl()
    if fcntl is not None:
        return _nothing if _try(fcntl, fd, fcntl.LOCK_EX) else None
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0, mode=_MODE, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock.release


def _try(fcntl: ModuleType, handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fcntl() -> ModuleType | None:
    """The module, where the system has it; Windows has not."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def _nothing() -> None:
    """Closing a file gives its lock back."""

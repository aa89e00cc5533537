"""The folder of what is made once and kept: models, compiled programs, quantized weights."""

import os
import stat
from pathlib import Path

from kvrt.errors import UsageError

WRITERS = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """The folder for models, programs and quantized weights, made private (0700) when created.

    `KVRT_CACHE`, or `kvrt` in the user's cache directory.

    Raises:
      UsageError: no home directory, or the folder cannot be created.
    """
    chosen = os.environ.get("KVRT_CACHE")
    try:
        path = Path(chosen).expanduser() if chosen else _user_cache() / "kvrt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"no cache folder: {error}; set KVRT_CACHE to a folder that can be written"
        ) from error
    return path.absolute()


def private_folder(name: str) -> Path:
    """A folder in the cache folder for what is trusted when it is read again.

    Raises:
      UsageError: there is no cache folder.
      OSError: it cannot be made or written, or others may write to it.
    """
    folder = cache_dir() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & WRITERS):
        raise PermissionError(f"{folder} belongs to another user or can be written by others")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")
    return folder


def _user_cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The specification wants relative paths ignored.
    return Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"

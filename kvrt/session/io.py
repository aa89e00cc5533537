"""One door for both containers: a single file, or a folder."""

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Literal

from kvrt.errors import BadSession, SaveError, UsageError, reason
from kvrt.session.divided import divided_groups
from kvrt.session.kv_file import file as kv_file
from kvrt.session.kv_file import frame
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.kv_file.file import Before, Saved
from kvrt.session.library.stored import FOLDER_INDEX
from kvrt.session.manifest import Manifest
from kvrt.session.opened import OpenedSession
from kvrt.session.orbax import folder
from kvrt.session.snapshot import Snapshot

Container = Literal["file", "folder"]
_FOLDER_SUFFIX = ".orbax"


def save(
    path: str | Path,
    snapshot: Snapshot,
    container: Container | None = None,
    *,
    before: Before | None = None,
    anew: bool = False,
) -> Saved:
    """Writes a session, whole or not at all.

    A file that holds an older session of the same beginning is made longer; a folder is an Orbax
    checkpoint, for caches that lie on several devices. What `Runtime.snapshot(divided=True)` left
    on devices of several processes is written by all of them: each calls this with the same path.

    Args:
      path: where to; its folder exists.
      snapshot: `Runtime.snapshot`.
      container: None is `container_at` the path.
      before: called with the path once no other writer can change what is there; what it raises
        keeps everything as it is. See `kvrt.session.change.replace`.
      anew: a file is written whole, without what earlier saves have left in it.

    Raises:
      SaveError: it cannot be written, or the path holds something that is no session; what was
        there before is still there.
    """
    path = Path(path)
    if (container or container_at(path)) == "folder":
        return folder.save(path, snapshot, before=before)
    return kv_file.save(path, snapshot, anew=anew, before=before)


def start_save(
    path: str | Path, snapshot: Snapshot, container: Container | None = None
) -> Future[Saved]:
    """`save` in a thread of its own, while decoding goes on; its result raises what went wrong.

    Raises:
      SaveError: several processes hold it; they write together, with nothing else between.
    """
    if any(not x.is_here for x in divided_groups(snapshot)):
        raise SaveError(
            f"{path}: several processes write it together, which none does in the background; "
            "use session.save in each of them"
        )
    job: Future[Saved] = Future()

    def run() -> None:
        try:
            job.set_result(save(path, snapshot, container))
        except BaseException as error:
            job.set_exception(error)

    # No daemon: a program that ends waits for its sessions.
    threading.Thread(target=run, name=f"save {path}").start()
    return job


def open_session(path: str | Path, *, is_use: bool = True) -> OpenedSession:
    """All of a session but its cached keys and values, parsed and checked.

    Args:
      path: of the session.
      is_use: False leaves a file's time of access alone where the system can.

    Raises:
      BadSession: it is damaged, or no session.
    """
    return _module(Path(path)).open_session(Path(path), is_use=is_use)


def open_existing(path: Path) -> OpenedSession:
    """`open_session` of a path that somebody names.

    Raises:
      UsageError: nothing is there.
      BadSession: it is damaged, or no session.
    """
    return open_session(existing(path))


def existing(path: Path) -> Path:
    """The path of a session that is to be read.

    Raises:
      UsageError: nothing is there, or nothing that may be seen.
    """
    try:
        path.stat()
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}; give the path of a session") from error
    return path


def real_path(name: str | Path) -> Path:
    """Where a session is written: what a link points to, so that the link stays one."""
    path = Path(name)
    return path.resolve() if path.is_symlink() else path


def holds_session(path: Path) -> bool:
    """Whether a session is at a path, sound or damaged, that no other output may replace."""
    if path.is_dir():
        return (path / FOLDER_INDEX).exists()
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return frame.is_session(file.read(frame.PAGE))


def is_library(path: Path) -> bool:
    """Whether a path is a folder of sessions, and not one session in a folder."""
    return os.path.isdir(path) and not os.path.exists(path / FOLDER_INDEX)


def read(session: str | Path | OpenedSession) -> Snapshot:
    """A session for `Runtime.restore`, every digest checked before it is returned.

    Args:
      session: its path, or what was opened: then only keys, values and states are read, and the
        manifest is parsed and checked anew only if the session was saved again since.

    Raises:
      BadSession: it is damaged, or no session; the message says where.
    """
    if isinstance(session, OpenedSession):
        return _module(session.path).read(session.path, session)
    path = Path(session)
    return _module(path).read(path)


def read_manifest(path: str | Path) -> Manifest:
    """What a session says of itself; keys and values are neither read nor checked.

    Raises:
      BadSession: it is damaged, or no session.
    """
    path = Path(path)
    return _module(path).read_manifest(path)


def read_cells(path: str | Path, *, is_use: bool = True) -> tuple[Manifest, Tensors]:
    """A session's manifest, and its cells, tokens and logits; cached keys and values are not read.

    Args:
      path: of the session.
      is_use: False leaves a file's time of access alone where the system can.

    Raises:
      BadSession: it is damaged, or no session.
    """
    return _module(Path(path)).read_cells(Path(path), is_use=is_use)


def read_parts(path: Path) -> tuple[Manifest, list[Tensors | BadSession]]:
    """The manifest of a damaged session, and each blob, or what is wrong with it.

    Raises:
      BadSession: the manifest is damaged, so that nothing is proven.
    """
    return _module(path).read_parts(path)


def container_at(path: Path) -> Container:
    """What stands at a path; where nothing does, a folder for a name in .orbax, else a file."""
    if path.is_dir():
        return "folder"
    return "folder" if path.suffix == _FOLDER_SUFFIX and not path.exists() else "file"


def _module(path: Path) -> ModuleType:
    """What knows the container that stands at a path."""
    return folder if container_at(path) == "folder" else kv_file

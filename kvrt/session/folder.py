"""Sessions in a folder: rows in an Orbax checkpoint, for caches that lie on several devices.

    book.kvd/session.json     a line with the manifest's sha256, then the manifest
    book.kvd/rows-<turn>/     the checkpoint that it names, and in part-<n> what is not rows; those
                              of older sessions are removed after it

Orbax writes each device's part from where it is and reads it for any number of devices, but has no
digests of what it reads: the manifest's are checked here as in a `.kv` file.
"""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvrt.arrays import AnyArray
from kvrt.errors import BadSession, SaveError, reason
from kvrt.session import blobs, files, parts
from kvrt.session import manifest as manifests
from kvrt.session import rows as row_kinds
from kvrt.session.blobs import Tensors
from kvrt.session.kv_file import Before, Saved
from kvrt.session.manifest import Blob, Manifest
from kvrt.session.snapshot import RowBlock, Snapshot
from kvrt.store.codec import AnyRows

INDEX = "session.json"
_MAGIC = b"kvrt-kvd 1 "
_N_HEAD = len(_MAGIC) + 6 + 1 + 64 + 1  # turn, space, sha256, newline
Sharding = Callable[[AnyArray], jax.sharding.Sharding]


def save(path: Path, snapshot: Snapshot, *, before: Before | None = None) -> Saved:
    """Writes a session into a folder, whole or not at all; `before` as for a file.

    Raises:
      SaveError: it cannot be written, or the path holds something that is no session.
    """
    with files.locked(path), files.told_of(path):
        if before is not None:
            before(path)
        turn = _begin(path)
        drafts = parts.to_tensors(snapshot)
        for tensors in drafts:
            _check_addressable(path, tensors)
        sums = [blobs.digest(tensors) for tensors in drafts]
        data = parts.manifest(snapshot, [Blob(offset=0, n_bytes=n, digest=d) for n, d in sums])
        _write(_rows(path, turn), drafts)
        head = _MAGIC + b"%06d %s\n" % (turn, hashlib.sha256(data).hexdigest().encode())
        files.replace(path / INDEX, lambda fd: files.write_at(fd, head + data, 0))
        for left in path.glob("rows-*"):
            if left != _rows(path, turn):
                shutil.rmtree(left, ignore_errors=True)
        n = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        return Saved(n_bytes=n, n_written=n)


def read_manifest(path: Path) -> Manifest:
    """What a session says of itself; rows are neither read nor checked; raises BadSession."""
    return _index(path)[1]


def read_cells(path: Path) -> tuple[Manifest, Tensors]:
    """A session's manifest, and its cells, tokens and logits; raises BadSession."""
    turn, found = _index(path)
    name = parts.blob_names(found)[-1]
    try:
        return found, _read_part(_rows(path, turn), len(found.blobs) - 1, found.meta, name)
    except BadSession as error:
        raise BadSession(f"{path}: {error}") from error


def read(path: Path, sharding: Sharding | None = None) -> Snapshot:
    """A session, every digest checked before it is returned.

    Args:
      path: the folder.
      sharding: where the rows of a block go, from the host's copy of them; None leaves them there.

    Raises:
      BadSession: it is damaged, or no session; the message says where.
    """
    turn, found = _index(path)
    rows = _rows(path, turn)
    try:
        tensors = _read_rows(rows, found)
        names = parts.blob_names(found)
        for i in range(len(tensors), len(names)):
            tensors.append(_read_part(rows, i, found.blobs[i], names[i]))
        snapshot = parts.from_tensors(found, tensors)
    except BadSession as error:
        raise BadSession(f"{path}: {error}") from error
    return _placed(snapshot, sharding) if sharding else snapshot


def _begin(path: Path) -> int:
    """Makes the folder; the number of the checkpoint to write."""
    if not path.exists():
        path.mkdir(mode=0o700)
        return 1
    if not (path / INDEX).exists() and any(path.iterdir()):
        raise SaveError(f"{path}: is no session and stays as it is; give another name")
    try:
        turn = _index(path)[0] + 1 if (path / INDEX).exists() else 1
    except BadSession:
        turn = 1
    # Of a writer that was stopped: the lock says that none is at work.
    for left in path.glob("rows-*"):
        if left == _rows(path, turn):
            shutil.rmtree(left)
    return turn


def _rows(path: Path, turn: int) -> Path:
    return path / f"rows-{turn:06d}"


def _index(path: Path) -> tuple[int, Manifest]:
    try:
        with open(path / INDEX, "rb") as file:
            data = file.read(manifests.MAX_BYTES)
    except OSError as error:
        why = reason(error)
        raise BadSession(f"{path}: {INDEX} cannot be read: {why}; give a session") from error
    head, body = data[:_N_HEAD], data[_N_HEAD:]
    turn, _, digest = head.removeprefix(_MAGIC).strip().partition(b" ")
    whole = head.startswith(_MAGIC) and turn.isdigit() and head.endswith(b"\n")
    if not whole or hashlib.sha256(body).hexdigest().encode() != digest:
        raise BadSession(
            f"{path}: {INDEX} has another sha256 than it was written with, or another format; "
            "the session is damaged, save it again"
        )
    try:
        return int(turn), manifests.from_json(body)
    except BadSession as error:
        raise BadSession(f"{path}: {error}") from error


def _check_addressable(path: Path, tensors: Tensors) -> None:
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in tensors.values()):
        raise SaveError(
            f"{path}: rows of other processes cannot be digested from this one; gather them, or "
            "save one session a process"
        )


def _write(path: Path, drafts: list[Tensors]) -> None:
    """Rows as a checkpoint, what follows them beside it."""
    n_rows = sum("k" in tensors for tensors in drafts)
    tree = {str(i): dict(tensors) for i, tensors in enumerate(drafts[:n_rows])}
    if tree:
        with _checkpointer() as writer:
            writer.save(path.absolute(), tree)
    path.mkdir(exist_ok=True)
    for i, tensors in enumerate(drafts[n_rows:], n_rows):
        files.replace(path / f"part-{i}", lambda fd, t=tensors: blobs.write(fd, t, 0))
    for file in [path, *path.rglob("*")]:
        os.chmod(file, 0o700 if file.is_dir() else files.MODE)


def _read_rows(path: Path, found: Manifest) -> list[Tensors]:
    """The row blocks, each with the digest that the manifest says."""
    import orbax.checkpoint as ocp

    held = [
        row_kinds.names(found.fingerprint, g)
        for g, group in enumerate(found.groups)
        for _ in group.blocks
    ]
    n = len(held)
    if not n:
        return []
    each = ocp.RestoreArgs(restore_type=np.ndarray)
    args = {str(i): dict.fromkeys(of, each) for i, of in enumerate(held)}
    try:
        with _checkpointer() as reader:
            tree = reader.restore(path.absolute(), restore_args=args)
    except Exception as error:  # Orbax and TensorStore raise of many kinds for damaged files
        why = " ".join(str(error).split())[:200]
        raise BadSession(f"rows cannot be read: {why}; the session is damaged") from error
    names = parts.blob_names(found)
    # A digest goes by the order in which they were written.
    tensors: list[Tensors] = [{x: tree[str(i)][x] for x in of} for i, of in enumerate(held)]
    for blob, name, x in zip(found.blobs[:n], names[:n], tensors, strict=True):
        if blobs.digest(x) != (blob.n_bytes, blob.digest):
            raise BadSession(
                f"{name} has another xxh3-128 than it was written with; the session is damaged, "
                "save it again"
            )
    return tensors


def _read_part(path: Path, i: int, blob: Blob, name: str) -> Tensors:
    try:
        fd = os.open(path / f"part-{i}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        why = reason(error)
        raise BadSession(f"{name} cannot be read: {why}; the session is damaged") from error
    try:
        return blobs.read(fd, blob, name)
    finally:
        os.close(fd)


def _placed(snapshot: Snapshot, sharding: Sharding) -> Snapshot:
    """The snapshot with its rows on devices."""

    def put(rows: AnyRows) -> AnyRows:
        return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), rows)

    groups = tuple(
        dataclasses.replace(g, blocks=[RowBlock(k=put(b.k), v=put(b.v)) for b in g.blocks])
        for g in snapshot.groups
    )
    return dataclasses.replace(snapshot, groups=groups)


def _checkpointer() -> Any:
    # Two seconds of imports that no other session needs.
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointer()

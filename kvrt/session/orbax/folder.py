"""Sessions in a folder: keys and values in an Orbax checkpoint, for caches on several devices.

    book.kvd/session.json     a line with the manifest's sha256, then the manifest
    book.kvd/rows-<generation>/     the checkpoint that it names, and in part-<n> all else; those
                              of older sessions are removed after it
    book.kvd/.rows-<generation>.<process>.tmp/   a checkpoint that is being written

Of a snapshot that the devices of a mesh hold each process writes a checkpoint of its own: `parts`,
`team`. Orbax writes each device's part from where it is. It does not wait for the disk: that is
done here before a checkpoint is named. It has no digests of what it reads, and a hostile checkpoint
ends the process that reads it, so `read` reads the arrays in a process of its own, and the
manifest's digests are checked here as in a `.kv` file.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvrt.arrays import AnyArray, DeviceArray
from kvrt.errors import DAMAGED, BadSession, SaveError, reason
from kvrt.files import atomic, regular
from kvrt.session import codec, expected
from kvrt.session import manifest as manifests
from kvrt.session.divided import DividedBlocks, divided_groups
from kvrt.session.kv_file import blobs
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.kv_file.file import Before, Saved
from kvrt.session.library import stored
from kvrt.session.library.stored import FOLDER_INDEX
from kvrt.session.manifest import Blob, Manifest
from kvrt.session.opened import OpenedSession, opened_session
from kvrt.session.orbax import rows, write
from kvrt.session.orbax.team import Team
from kvrt.session.snapshot import KVBlock, Snapshot
from kvrt.store.quantized import AnyKVArray, each

if TYPE_CHECKING:
    import jax

_MAGIC = b"kvrt-kvd 1 "
_N_HEAD = len(_MAGIC) + 6 + 1 + 64 + 1  # generation, space, sha256, newline
_MAX_GENERATION = 999_999  # which six digits can say
# Half ones are those of Orbax, where nothing else wrote them.
_ROWS = re.compile(r"rows-[0-9]{6}(\.orbax-checkpoint-tmp.*)?")
_TEMPORARY = re.compile(r"\.rows-[0-9]{6}\.[0-9]+\.tmp")
Sharding = Callable[[AnyArray], "jax.sharding.Sharding"]


def save(path: Path, snapshot: Snapshot, *, before: Before | None = None) -> Saved:
    """Writes a session into a folder, whole or not at all; `before` as for a file.

    Of a snapshot that devices of several processes hold each process calls this, with one path;
    `before` is called in the first alone.

    Raises:
      SaveError: it cannot be written, or the path holds something that is no session.
    """
    groups = divided_groups(snapshot)
    team = Team.of_jax() if groups else Team()
    if not team.leads:
        return _follow(path, groups, team)
    with team.told(), atomic.locked(path), atomic.told_of(path):
        if before is not None:
            before(path)
        drafts = codec.rest_tensors(snapshot) if groups else codec.to_tensors(snapshot)
        for tensors in drafts:
            _check_addressable(path, tensors)
        sums = [blobs.blob_digest(tensors) for tensors in drafts]
        generation, made = _begin(path)
        try:
            sums = _write(_rows(path, generation), drafts, groups, team) + sums
            found = [Blob(offset=0, n_bytes=n, digest=d) for n, d in sums]
            data = codec.manifest(snapshot, found, [x.division for x in groups])
            with codec.refused_as_unreadable(path):
                _check_readable(_rows(path, generation), data)
            _replace_index(path, generation, data)
            if made:
                atomic.sync_folder(path.parent)
        except BaseException:
            _take_back(path, generation, made)
            raise
        for left in _rows_of_others(path, generation):
            shutil.rmtree(left, ignore_errors=True)
        return _saved(path)


def _follow(path: Path, groups: Sequence[DividedBlocks], team: Team) -> Saved:
    """Takes part in the save that the first process leads."""
    with atomic.told_of(path):
        there = Path(team.hear()["rows"])
        try:
            team.together(lambda: rows.write_own(there, groups, team.index))
        except BaseException:
            with contextlib.suppress(SaveError):
                team.hear()
            raise
        team.hear()
    return _saved(path)


def _saved(path: Path) -> Saved:
    n = stored.bytes_on_disk(path)
    return Saved(n_bytes=n, n_written=n)


def read_manifest(path: Path) -> Manifest:
    """As `io.read_manifest`; raises BadSession."""
    return _index(path)[2]


def read_cells(path: Path, *, is_use: bool = True) -> tuple[Manifest, Tensors]:
    """As `io.read_cells`; raises BadSession."""
    _, found, meta = _read_cells(path, is_use)
    return found, meta


def open_session(path: Path, *, is_use: bool = True) -> OpenedSession:
    """As `io.open_session`; raises BadSession."""
    sha256, found, meta = _read_cells(path, is_use)
    return opened_session(path, found, sha256, meta)


def _read_cells(path: Path, is_use: bool) -> tuple[bytes, Manifest, Tensors]:
    generation, sha256, found = _index(path, is_use=is_use)
    name = codec.blob_names(found)[-1]
    try:
        part = rows.read_part(_rows(path, generation), len(found.blobs) - 1, found.meta, name)
    except BadSession as error:
        raise BadSession(f"{path}: {error}") from error
    return sha256, found, part


def read(
    path: Path, known: OpenedSession | None = None, *, sharding: Sharding | None = None
) -> Snapshot:
    """A session, every digest checked before it is returned.

    Args:
      path: the folder.
      known: what was read of it before; parsed and checked anew only if it was saved again since.
      sharding: where keys and values of a block go, from the host's copy; None leaves them there.

    Raises:
      BadSession: it is damaged, or no session; the message says where.
    """
    generation, sha256, found = _index(path, known)
    while True:
        same = known if known is not None and known.sha256 == sha256 else None
        try:
            snapshot = _read(_rows(path, generation), found, same)
            return _placed(snapshot, sharding) if sharding else snapshot
        except BadSession as error:
            # A save beside this read may have replaced the rows: then the newer ones are whole.
            before, (generation, sha256, found) = generation, _index(path)
            if generation == before:
                raise BadSession(f"{path}: {error}") from error


def read_parts(path: Path) -> tuple[Manifest, list[Tensors | BadSession]]:
    """As `io.read_parts`; raises BadSession."""
    generation, _, found = _index(path)
    return found, rows.read_sound(_rows(path, generation), found)


def _read(at: Path, found: Manifest, known: OpenedSession | None) -> Snapshot:
    tensors = rows.read_rows(at, found)
    names = codec.blob_names(found)
    for i in range(len(tensors), len(names) - (known is not None)):
        tensors.append(rows.read_part(at, i, found.blobs[i], names[i]))
    if known is None:
        return codec.from_tensors(found, tensors)
    return codec.from_tensors(found, [*tensors, known.meta], (known.groups, known.history))


def _begin(path: Path) -> tuple[int, bool]:
    """Makes a folder a session's, and removes what stopped writers left: the lock says they are.

    An index without a session stands there from the beginning, so that what a first save leaves
    when it is killed is known for our own.

    Returns:
      The number of the checkpoint to write, and whether the session is a new one.
    """
    made = not path.exists()
    if made:
        path.mkdir(mode=0o700)
    elif not path.is_dir():
        raise SaveError(f"{path}: is a file; give another name for a session in a folder")
    atomic.sweep(path / FOLDER_INDEX)
    if not (path / FOLDER_INDEX).exists():
        if any(path.iterdir()):
            raise _no_session(path)
        _replace_index(path, 0, b"")
        return 1, True
    with open(path / FOLDER_INDEX, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise _no_session(path)
    try:
        generation, _ = _head(path)
    except BadSession:
        # Whatever may still be of use to somebody stays until the new session is there.
        generation = max((int(x.name[5:11]) for x in _rows_of_others(path, None)), default=0)
    else:
        for left in _rows_of_others(path, generation):
            shutil.rmtree(left)
    for left in path.iterdir():
        if _TEMPORARY.fullmatch(left.name) and left.is_dir():
            shutil.rmtree(left)
    return generation % _MAX_GENERATION + 1, False


def _take_back(path: Path, generation: int, made: bool) -> None:
    """Removes what a failed save has written, unless its session stands already."""
    with contextlib.suppress(BadSession):
        if _index(path)[0] == generation:
            return
    shutil.rmtree(_rows(path, generation), ignore_errors=True)
    if made:
        with contextlib.suppress(OSError):
            (path / FOLDER_INDEX).unlink()
            path.rmdir()  # where nothing else is in it


def _rows_of_others(path: Path, generation: int | None) -> list[Path]:
    """Checkpoints of other sessions than one, whole or half."""
    found = [x for x in path.iterdir() if _ROWS.fullmatch(x.name) and x.is_dir()]
    return [x for x in found if generation is None or x != _rows(path, generation)]


def _replace_index(path: Path, generation: int, data: bytes) -> None:
    head = _MAGIC + b"%06d %s\n" % (generation, hashlib.sha256(data).hexdigest().encode())
    atomic.replace(path / FOLDER_INDEX, lambda fd: atomic.write_at(fd, head + data, 0))


def _no_session(path: Path) -> SaveError:
    return SaveError(f"{path}: is no session and stays as it is; give another name")


def _rows(path: Path, generation: int) -> Path:
    return path / f"rows-{generation:06d}"


def _index(
    path: Path, known: OpenedSession | None = None, *, is_use: bool = True
) -> tuple[int, bytes, Manifest]:
    """The number of a session's checkpoint, the manifest's sha256, and the manifest."""
    generation, body = _head(path, is_use)
    if not generation:
        raise BadSession(f"{path}: its first save was not finished; {DAMAGED}")
    sha256 = hashlib.sha256(body).digest()
    if known is not None and known.sha256 == sha256:
        return generation, sha256, known.manifest
    try:
        return generation, sha256, _manifest(body)
    except BadSession as error:
        raise BadSession(f"{path}: {error}") from error


def _manifest(body: bytes) -> Manifest:
    """The manifest in such bytes, checked."""
    found = manifests.from_json(body)
    expected.check_manifest(found)
    return found


def _check_readable(written: Path, body: bytes) -> None:
    """Reads back manifest and cells by the rules of a reader, before the index names them."""
    found = _manifest(body)
    name = codec.blob_names(found)[-1]
    codec.cells(found, rows.read_part(written, len(found.blobs) - 1, found.meta, name))


def _head(path: Path, is_use: bool = True) -> tuple[int, bytes]:
    """That number, 0 before the first session is there, and the manifest in bytes."""
    try:
        with regular.open_file(path / FOLDER_INDEX) as file:
            if not is_use:
                stored.keep_atime(file.fileno())
            data = file.read(manifests.MAX_BYTES + _N_HEAD)
    except OSError as error:
        why = reason(error)
        raise BadSession(f"{path}: {FOLDER_INDEX} cannot be read: {why}; give a session") from error
    head, body = data[:_N_HEAD], data[_N_HEAD:]
    generation, _, digest = head.removeprefix(_MAGIC).strip().partition(b" ")
    whole = head.startswith(_MAGIC) and generation.isdigit() and head.endswith(b"\n")
    if not whole or hashlib.sha256(body).hexdigest().encode() != digest:
        raise BadSession(
            f"{path}: {FOLDER_INDEX} has another sha256 than it was written with, or another "
            f"format; {DAMAGED}"
        )
    return int(generation), body


def _check_addressable(path: Path, tensors: Tensors) -> None:
    if any(
        isinstance(x, DeviceArray) and not (x.is_fully_addressable or x.is_fully_replicated)
        for x in tensors.values()
    ):
        raise SaveError(
            f"{path}: keys and values of other processes cannot be digested from this one; gather "
            "them, or save one session a process"
        )


def _write(
    path: Path, drafts: list[Tensors], groups: Sequence[DividedBlocks], team: Team
) -> list[tuple[int, str]]:
    """Rows as a checkpoint, what follows them beside it; on the disk when it returns.

    It is written in a folder that nobody else can enter, for Orbax's files are open to all.

    Returns:
      Bytes and digests of what the devices of all processes wrote; of other rows none.
    """
    n_rows = sum("k" in tensors for tensors in drafts)
    tree = {str(i): dict(tensors) for i, tensors in enumerate(drafts[:n_rows])}
    private = atomic.temporary(path)
    private.mkdir(mode=0o700)
    sums: list[tuple[int, str]] = []
    try:
        new = private / "rows"
        if tree:
            with write.told_by_system():
                write.write_checkpoint(new, tree)
        new.mkdir(exist_ok=True)
        if groups:
            here = new.absolute()
            team.say({"rows": str(here)})
            said = team.together(lambda: rows.write_own(here, groups, team.index))
            sums = rows.sums_in_order(said, groups)
        for i, tensors in enumerate(drafts[n_rows:], len(sums) + n_rows):
            atomic.replace(new / f"part-{i}", lambda fd, t=tensors: blobs.write_blob(fd, t, 0))
        rows.make_private(new)
        atomic.sync_tree(new)
        os.rename(new, path)
        private.rmdir()
        atomic.sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    return sums


def _placed(snapshot: Snapshot, sharding: Sharding) -> Snapshot:
    """The snapshot with its keys and values on devices."""
    import jax  # no reader on the host needs it

    def put(rows: AnyKVArray) -> AnyKVArray:
        return each(lambda x: jax.device_put(x, sharding(x)), rows)

    groups = tuple(
        dataclasses.replace(g, blocks=[KVBlock(k=put(b.k), v=put(b.v)) for b in g.blocks])
        for g in snapshot.groups
    )
    return dataclasses.replace(snapshot, groups=groups)

"""Sessions in a single `.kv` file: written whole or made longer, read if every digest holds."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvrt.errors import DAMAGED, BadSession, SaveError, reason
from kvrt.files import atomic, regular
from kvrt.session import codec, expected
from kvrt.session import manifest as manifests
from kvrt.session.kv_file import blobs, frame
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.kv_file.frame import PAGE, Frame
from kvrt.session.library import stored
from kvrt.session.manifest import Blob, Manifest
from kvrt.session.opened import OpenedSession, opened_session
from kvrt.session.snapshot import Snapshot

# Part of a session that the file must hold already to be made longer instead of written anew.
_LEAST_KEPT = 0.5
# Of a page that takes microseconds to read, while a writer waits for the disk between its changes.
_MOST_READS = 1000
Before = Callable[[Path], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """What a save did: bytes of the file, and how many of them it wrote."""

    n_bytes: int
    n_written: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Placed:
    """A blob and what to write there; None if it stands there already."""

    blob: Blob
    tensors: Tensors | None


def save(
    path: Path, snapshot: Snapshot, *, anew: bool = False, before: Before | None = None
) -> Saved:
    """Writes a session; blobs that the file holds already stay where they are.

    Args:
      path: a file that need not be there.
      snapshot: what is saved.
      anew: writes all of it, so that nothing older stays in the file.
      before: called with the path once it is locked; what it raises keeps everything as it is.

    Raises:
      SaveError: it cannot be written, or the path holds something that is no session.
    """
    with atomic.locked(path), atomic.told_of(path):
        if before is not None:
            before(path)
        drafts = codec.to_tensors(snapshot)
        if path.exists():
            done = _lengthen(path, snapshot, drafts) if not anew else _check_replaced(path)
            if done is not None:
                return done
        placed = _place(drafts, PAGE, {})
        data = codec.manifest(snapshot, [p.blob for p in placed])
        first = frame.of_manifest(data, _end(placed, PAGE), generation=1)

        def write(fd: int) -> None:
            _write_blobs(fd, placed)
            atomic.write_at(fd, data, first.offset)
            atomic.write_at(fd, frame.page(first), 0)
            _check_readable(fd, first, drafts)

        with codec.refused_as_unreadable(path):
            atomic.replace(path, write)
        return Saved(n_bytes=first.end, n_written=first.end)


def read_manifest(path: Path) -> Manifest:
    """As `io.read_manifest`; raises BadSession."""
    with _opened(path) as (_, _, found):
        return found


def read_cells(path: str | Path, *, is_use: bool = True) -> tuple[Manifest, Tensors]:
    """As `io.read_cells`; raises BadSession."""
    with _opened(Path(path), is_use=is_use) as (fd, _, found):
        return found, blobs.read_blob(fd, found.meta, "the cells")


def open_session(path: Path, *, is_use: bool = True) -> OpenedSession:
    """As `io.open_session`; raises BadSession."""
    with _opened(path, is_use=is_use) as (fd, first, found):
        meta = blobs.read_blob(fd, found.meta, "the cells")
    return opened_session(path, found, first.sha256, meta)


def read(path: Path, known: OpenedSession | None = None) -> Snapshot:
    """A session, every digest checked before it is returned.

    Args:
      path: of the file.
      known: what was read of it before; parsed and checked anew only if it was saved again since.

    Raises:
      BadSession: it is damaged, or no session; the message says where.
    """
    with _opened(path, known=known) as (fd, first, found):
        names = codec.blob_names(found)
        left = list(zip(found.blobs, names, strict=True))
        if known is None or known.sha256 != first.sha256:
            return codec.from_tensors(
                found, [blobs.read_blob(fd, blob, name) for blob, name in left]
            )
        arrays = [blobs.read_blob(fd, blob, name) for blob, name in left[:-1]]
        checked = known.groups, known.history
        return codec.from_tensors(found, [*arrays, known.meta], checked)


def read_parts(path: Path) -> tuple[Manifest, list[Tensors | BadSession]]:
    """As `io.read_parts`; raises BadSession where no manifest is proven by its sha256."""
    with _naming(path) as fd:
        found = _proven_manifest(fd)
        return found, [
            _tensors_or_error(fd, blob, name)
            for blob, name in zip(found.blobs, codec.blob_names(found), strict=True)
        ]


def _proven_manifest(fd: int) -> Manifest:
    """The newest manifest that a slot names, whole or not, and whose sha256 is right."""
    n_file = os.fstat(fd).st_size
    for first in frame.claimed_frames(atomic.read_at(fd, PAGE, 0)):
        if first.n_bytes <= manifests.MAX_BYTES and first.offset + first.n_bytes <= n_file:
            data = atomic.read_at(fd, first.n_bytes, first.offset)
            if hashlib.sha256(data).digest() == first.sha256:
                return _checked_manifest(data, first.offset)
    raise BadSession("no manifest has the sha256 that the first page names")


def _tensors_or_error(fd: int, blob: Blob, name: str) -> Tensors | BadSession:
    try:
        return blobs.read_blob(fd, blob, name)
    except BadSession as error:
        return error


@contextlib.contextmanager
def _opened(
    path: Path, *, is_use: bool = True, known: OpenedSession | None = None
) -> Iterator[tuple[int, Frame, Manifest]]:
    """An open session; errors name it."""
    with _naming(path) as fd:
        if not is_use:
            stored.keep_atime(fd)
        yield fd, *_parsed(fd, known)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[int]:
    """An open file; errors name it."""
    try:
        fd = regular.open_fd(path)
    except OSError as error:
        why = reason(error)
        raise BadSession(f"{path}: cannot be read: {why}; give a session file") from error
    try:
        yield fd
    except BadSession as error:
        raise BadSession(f"{path}: {error}") from error
    except OSError as error:
        raise BadSession(f"{path}: cannot be read: {error.strerror}; copy it again") from error
    finally:
        os.close(fd)


def _parsed(fd: int, known: OpenedSession | None = None) -> tuple[Frame, Manifest]:
    first = frame.newest_frame(*_first_page(fd))
    if known is not None and known.sha256 == first.sha256:
        return first, known.manifest
    return first, _manifest(fd, first)


def _manifest(fd: int, first: Frame) -> Manifest:
    """The manifest that a frame names, checked."""
    if first.n_bytes > manifests.MAX_BYTES:
        raise BadSession(
            f"the manifest has {first.n_bytes} bytes, the limit is {manifests.MAX_BYTES}; {DAMAGED}"
        )
    data = atomic.read_at(fd, first.n_bytes, first.offset)
    if hashlib.sha256(data).digest() != first.sha256:
        raise BadSession(
            f"the manifest, bytes {first.offset} to {first.end}, has another sha256 than it was "
            f"written with; {DAMAGED}"
        )
    return _checked_manifest(data, first.end)


def _checked_manifest(data: bytes, end: int) -> Manifest:
    """A manifest that contradicts neither itself nor the size of its file."""
    found = manifests.from_json(data)
    blobs.check_places(found.blobs, PAGE, end)
    expected.check_manifest(found)
    return found


def _check_readable(fd: int, new: Frame, drafts: Sequence[Tensors]) -> None:
    """Reads back what was written, by the rules of a reader, before it takes effect.

    Keys, values and states are checked in memory; only manifest and cells are read.

    Raises:
      BadSession: a reader would refuse it.
    """
    found = _manifest(fd, new)
    meta = blobs.read_blob(fd, found.meta, "the cells")
    codec.from_tensors(found, [*drafts[:-1], meta])


def _first_page(fd: int) -> tuple[bytes, int]:
    """The first page, and the size of the file at a moment when it was that page.

    A writer that makes the file longer changes the page first: a size that was asked for before or
    after such a change would belong to another page.
    """
    page = atomic.read_at(fd, PAGE, 0)
    for _ in range(_MOST_READS):
        n_file = os.fstat(fd).st_size
        again = atomic.read_at(fd, PAGE, 0)
        if again == page:
            return page, n_file
        page = again
    raise BadSession(f"its first page changed {_MOST_READS} times while it was read; read it again")


def _lengthen(path: Path, snapshot: Snapshot, drafts: Sequence[Tensors]) -> Saved | None:
    """Writes behind an older session what it lacks; None if it has to be written anew."""
    fd = regular.open_fd(path, os.O_RDWR)
    try:
        if os.fstat(fd).st_nlink > 1:
            _check_replaced(path)
            return None  # The file's other name, a backup or a user's own, keeps what it holds.
        try:
            first, old = _parsed(fd)
        except BadSession as error:
            if not frame.is_session(atomic.read_at(fd, PAGE, 0)):
                raise SaveError(
                    f"{path}: is no session and stays as it is ({error}); give another name"
                ) from error
            return None
        known: dict[str, list[Blob]] = {}
        for blob in old.blobs:
            known.setdefault(blob.digest, []).append(blob)
        placed = _place(drafts, first.end, known)
        kept = [p.blob for p in placed if p.tensors is None]
        n_all, n_kept = (sum(b.n_bytes for b in x) for x in ([p.blob for p in placed], kept))
        if n_kept < _LEAST_KEPT * max(n_all, first.end) or not all(
            blobs.holds(fd, b) for b in kept
        ):
            return None
        with codec.refused_as_unreadable(path):
            return _append(fd, first, snapshot, placed, drafts)
    finally:
        os.close(fd)


def _check_replaced(path: Path) -> None:
    """Refuses to write over what is no session."""
    fd = regular.open_fd(path)
    try:
        if not frame.is_session(atomic.read_at(fd, PAGE, 0)):
            raise SaveError(f"{path}: is no session and stays as it is; give another name")
    finally:
        os.close(fd)


def _append(
    fd: int,
    old: Frame,
    snapshot: Snapshot,
    placed: Sequence[_Placed],
    drafts: Sequence[Tensors],
) -> Saved:
    """The steps that `frame` describes, each on the disk before the next."""
    data = codec.manifest(snapshot, [p.blob for p in placed])
    at_work = dataclasses.replace(old, limit=frame.NO_LIMIT)
    atomic.write_at(fd, frame.slot(at_work), frame.SLOTS[1])
    os.fsync(fd)
    new = frame.of_manifest(data, _end(placed, old.end), generation=old.generation + 1)
    _write_blobs(fd, placed)
    atomic.write_at(fd, data, new.offset)
    os.ftruncate(fd, new.end)
    os.fsync(fd)
    try:
        _check_readable(fd, new, drafts)
    except BadSession:
        os.ftruncate(fd, old.end)
        atomic.write_at(fd, frame.slot(old), frame.SLOTS[1])
        raise
    for at in frame.SLOTS:
        atomic.write_at(fd, frame.slot(new), at)
        os.fsync(fd)
    return Saved(n_bytes=new.end, n_written=new.end - old.end)


def _place(drafts: Sequence[Tensors], start: int, known: dict[str, list[Blob]]) -> list[_Placed]:
    """Where each blob stands, those that are not known one behind the other from `start`.

    Of equal blobs each has a place of its own, for no place may be named twice.
    """
    out = []
    for tensors in drafts:
        n_bytes, digest = blobs.blob_digest(tensors)
        same = known.get(digest, [])
        if same and same[0].n_bytes == n_bytes:
            out.append(_Placed(blob=same.pop(0), tensors=None))
            continue
        blob = Blob(offset=start, n_bytes=n_bytes, digest=digest)
        out.append(_Placed(blob=blob, tensors=tensors))
        start += n_bytes
    return out


def _end(placed: Sequence[_Placed], start: int) -> int:
    """Where the manifest goes: behind the new blobs."""
    new = [p.blob for p in placed if p.tensors is not None]
    return max([start, *(b.offset + b.n_bytes for b in new)])


def _write_blobs(fd: int, placed: Sequence[_Placed]) -> None:
    for p in placed:
        if p.tensors is not None:
            blobs.write_blob(fd, p.tensors, p.blob.offset)

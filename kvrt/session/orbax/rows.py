"""What the devices of a mesh hold of a session, as each process writes it and any reads it.

    rows-<generation>/process-<n>/     an Orbax checkpoint with the shards of process n

An array is a round of 256 cells of every part; of it a process writes the shards of its own devices
and no others, so that an array is whole in none of the checkpoints unless one process wrote all.

They are read by a process with limits: see `child`.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvrt.errors import DAMAGED, BadSession, SaveError, reason
from kvrt.files import atomic, regular
from kvrt.session import codec, expected
from kvrt.session.divided import DividedBlocks, pieces
from kvrt.session.expected import ArraySpec
from kvrt.session.kv_file import blobs
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.manifest import Blob, Manifest
from kvrt.session.orbax import write
from kvrt.session.snapshot import BLOCK_CELLS

# Arrays of real models are pressed by a tenth; what takes far less room on the disk than in memory
# is no session. Small ones may be of any kind.
_MOST_TIMES, _SMALL_BYTES = 64, 64 << 20
_WALL_S, _BYTES_A_SECOND = 600.0, 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """What is read of one array of a checkpoint.

    Attributes:
      spec: shape and dtype of what is read.
      name: of the array.
      folder: of the checkpoint, below the path; "" is the path itself.
      start: where the region begins, by axis.
      whole: shape of the array.
      chunk: the greatest chunk that it may be kept in.
    """

    spec: ArraySpec
    name: str
    folder: str
    start: tuple[int, ...]
    whole: tuple[int, ...]
    chunk: tuple[int, ...]

    def said(self) -> dict[str, Any]:
        """As `child` is asked for it."""
        return {
            "folder": self.folder,
            "name": self.name,
            "shape": self.whole,
            "dtype": self.spec.dtype,
            "chunk": self.chunk,
            "region": [(a, a + n) for a, n in zip(self.start, self.spec.shape, strict=True)],
        }


def whole_array(name: str, spec: ArraySpec) -> Region:
    """All of an array."""
    start = (0,) * len(spec.shape)
    return Region(spec=spec, name=name, folder="", start=start, whole=spec.shape, chunk=spec.shape)


def read_checkpoint(path: Path, wanted: Sequence[Region]) -> list[np.ndarray]:
    """Arrays, or regions of them, in the order in which they are wanted.

    Args:
      path: folder of the checkpoint, or of several.
      wanted: what is read of every array; at most so much memory is taken for them.

    Raises:
      BadSession: an array is missing, has other metadata or cannot be read, or a file of the folder
        is no plain file; this process is never in danger.
    """
    n_bytes = sum(x.spec.n_bytes for x in wanted)
    check_size(path, n_bytes)
    arrays = [x.said() for x in wanted]
    request = json.dumps({"path": str(path.absolute()), "arrays": arrays})
    # -P keeps this folder's modules from hiding the library's.
    command = [sys.executable, "-P", str(Path(__file__).with_name("child.py"))]
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        )
        timer = threading.Timer(_WALL_S + n_bytes / _BYTES_A_SECOND, child.kill)
        timer.start()
        try:
            found = _exchange(child, request.encode(), [x.spec for x in wanted])
        finally:
            timer.cancel()
            child.kill()
            child.wait()
        if found is None:
            said.seek(0)
            raise _refused(child.returncode, said.read(1 << 12))
        return found


def check_size(path: Path, n_bytes: int) -> None:
    """Refuses more bytes than the files of a folder can hold, before memory is taken for them.

    Raises:
      BadSession: they are too many, or a file is no plain file.
    """
    n_files = _file_bytes(path)
    if n_bytes > max(_SMALL_BYTES, _MOST_TIMES * n_files):
        raise BadSession(
            f"arrays of {n_bytes:,} bytes are wanted from {n_files:,} bytes of files, "
            f"{_MOST_TIMES} times as many at most; {DAMAGED}"
        )


def _exchange(
    child: "subprocess.Popen[bytes]", request: bytes, wanted: Sequence[ArraySpec]
) -> list[np.ndarray] | None:
    """Sends the request and takes the arrays; None if they do not come whole."""
    assert child.stdin is not None and child.stdout is not None
    found = []
    with child.stdout as out:
        try:
            with child.stdin as to:
                to.write(request)
        except BrokenPipeError:
            pass  # It says why on its standard error.
        for x in wanted:
            found.append(np.empty(x.shape, x.dtype))
            if not _fill(out.fileno(), found[-1]):
                child.wait()
                return None
        return found if not out.read(1) and child.wait() == 0 else None


def _fill(fd: int, array: np.ndarray) -> bool:
    left = memoryview(array.reshape(-1).view(np.uint8).data)
    while left:
        n = os.readv(fd, [left])
        if not n:
            return False
        left = left[n:]
    return True


def _file_bytes(path: Path) -> int:
    """Bytes of all files below a folder.

    Raises:
      BadSession: one is a link, a pipe or a device, or the folder cannot be read.
    """
    total, left = 0, [path]
    try:
        while left:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
                    else:
                        raise BadSession(f"{entry.name} is no plain file; {DAMAGED}")
    except OSError as error:
        why = reason(error)
        raise BadSession(f"keys and values cannot be read: {why}; {DAMAGED}") from error
    return total


def _refused(code: int, said: bytes) -> BadSession:
    """Why no arrays came: the child's own line, or what ended it."""
    if code == 1 and said:
        why = " ".join(said.decode(errors="replace").split())[:200]
    else:
        why = f"reading them takes more memory or time than they need (status {code})"
    return _unreadable(why)


def _unreadable(why: str) -> BadSession:
    return BadSession(f"keys and values cannot be read: {why}; {DAMAGED}")


Regions = dict[str, Region]  # of one block or piece, by array


def read_rows(path: Path, found: Manifest) -> list[Tensors]:
    """Blocks of keys and values, or pieces, each with the digest that the manifest says.

    Args:
      path: of the checkpoint.
      found: the manifest.

    Raises:
      BadSession: one cannot be read, or has another digest.
    """
    tensors = _read_regions(path, _regions(found))
    for blob, name, x in zip(found.blobs, codec.blob_names(found), tensors, strict=False):
        if error := _wrong_digest(x, blob, name):
            raise error
    return tensors


def read_part(path: Path, i: int, blob: Blob, name: str) -> Tensors:
    """The tensors of a blob that lies beside keys and values.

    Args:
      path: of the checkpoint.
      i: which blob of the manifest it is.
      blob: what the manifest says of it.
      name: for messages.

    Raises:
      BadSession: it cannot be read, or has another size or digest.
    """
    try:
        fd = regular.open_fd(path / f"part-{i}")
    except OSError as error:
        why = reason(error)
        raise BadSession(f"{name} cannot be read: {why}; {DAMAGED}") from error
    try:
        n_file = os.fstat(fd).st_size
        if n_file != blob.n_bytes:
            raise BadSession(
                f"{name} has {n_file} bytes, the manifest says {blob.n_bytes}; {DAMAGED}"
            )
        return blobs.read_blob(fd, blob, name)
    finally:
        os.close(fd)


def read_sound(path: Path, found: Manifest) -> list[Tensors | BadSession]:
    """Every blob of a manifest, or what is wrong with it.

    Raises:
      BadSession: the manifest names more bytes than the files can hold.
    """
    check_size(path, sum(blob.n_bytes for blob in found.blobs))
    names, out = codec.blob_names(found), _readable(path, _regions(found))
    for i, x in enumerate(out):
        if not isinstance(x, BadSession):
            out[i] = _wrong_digest(x, found.blobs[i], names[i]) or x
    for i in range(len(out), len(names)):
        try:
            out.append(read_part(path, i, found.blobs[i], names[i]))
        except BadSession as error:
            out.append(error)
    return out


def _readable(path: Path, wanted: Sequence[Regions]) -> list[Tensors | BadSession]:
    """What a checkpoint gives: all of it, or of each half that fails its halves."""
    try:
        return list(_read_regions(path, wanted))
    except BadSession as error:
        if len(wanted) == 1:
            return [error]
    half = len(wanted) // 2
    return [*_readable(path, wanted[:half]), *_readable(path, wanted[half:])]


def _regions(found: Manifest) -> list[Regions]:
    """What is read of a checkpoint, by block or piece."""
    held: list[Regions] = []
    for g, group in enumerate(found.groups):
        if group.division is not None:
            held += regions(found, g)
            continue
        for i in range(len(group.blocks)):
            specs, n = expected.row_block(found, g, i), len(held)
            held.append({x: whole_array(f"{n}.{x}", spec) for x, spec in specs.items()})
    return held


def _read_regions(path: Path, wanted: Sequence[Regions]) -> list[Tensors]:
    """The arrays of each block or piece, in the order in which they were written."""
    regions = [x for of in wanted for x in of.values()]
    left = iter(read_checkpoint(path, regions) if regions else ())
    return [{x: next(left) for x in of} for of in wanted]


def _wrong_digest(tensors: Tensors, blob: Blob, name: str) -> BadSession | None:
    """The error of tensors that have another digest than the manifest says."""
    if blobs.blob_digest(tensors) == (blob.n_bytes, blob.digest):
        return None
    return BadSession(f"{name} has another xxh3-128 than it was written with; {DAMAGED}")


Sums = list[tuple[int, int, str]]  # number of a piece among all, bytes, digest


def write_own(rows: Path, groups: Sequence[DividedBlocks], index: int) -> Sums:
    """Writes what the devices of process `index` hold; on the disk when it returns.

    Raises:
      SaveError: the folder of the first process is not to be seen from here.
      OSError: the system refuses.
    """
    if not rows.is_dir():
        raise SaveError(
            f"{rows}: process {index} does not see the folder that process 0 made; give a name "
            "in a folder that all of them share"
        )
    first, sums, tree = 0, Sums(), {}
    for g, group in enumerate(groups):
        mine: dict[str, Any] = {}
        for i, tensors in group.own():
            sums.append((first + i, *blobs.blob_digest(tensors)))
            block = pieces(group.division)[i].block
            mine[str(block)] = dict(group.round_arrays(block))
        first += group.division.n_pieces
        if mine:
            tree[str(g)] = mine
    if tree:
        own = rows / _folder(index)
        with write.told_by_system():
            write.write_own_shards(own, tree)
        make_private(own)
        atomic.sync_tree(own)
    return sums


def sums_in_order(found: Sequence[Sums], groups: Sequence[DividedBlocks]) -> list[tuple[int, str]]:
    """Bytes and digests of all pieces in their order, from those of each process."""
    said = {i: (n_bytes, digest) for i, n_bytes, digest in itertools.chain(*found)}
    return [said[i] for i in range(sum(group.division.n_pieces for group in groups))]


def make_private(folder: Path) -> None:
    """Closes a folder and all in it to others; Orbax's files are open to all."""
    for file in [folder, *folder.rglob("*")]:
        os.chmod(file, 0o700 if file.is_dir() else atomic.MODE)


def regions(found: Manifest, group: int) -> list[dict[str, Region]]:
    """Where the arrays of every piece of a group are, by piece."""
    parts, whole = found.groups[group].parts, expected.round_arrays(found, group)
    out = []
    for i, piece in enumerate(pieces(parts)):
        of = {}
        for x, spec in expected.row_block(found, group, i).items():
            n_layers, _, n_heads, n = spec.shape
            of[x] = Region(
                spec=spec,
                name=f"{group}.{piece.block}.{x}",
                folder=_folder(parts.writer(piece.part, piece.head)),
                start=(0, piece.part * BLOCK_CELLS, piece.head * n_heads, 0),
                whole=whole[x].shape,
                chunk=(n_layers, BLOCK_CELLS, n_heads, n),
            )
        out.append(of)
    return out


def _folder(index: int) -> str:
    return f"process-{index}"

"""Reads what a folder session holds beside its manifest, and compares it with the digests there."""

import os
from collections.abc import Sequence
from pathlib import Path

from kvrt.errors import DAMAGED, BadSession, reason
from kvrt.files import regular
from kvrt.session import codec, expected
from kvrt.session.kv_file import blobs
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.manifest import Blob, Manifest
from kvrt.session.orbax import parts
from kvrt.session.orbax.read import Region, check_size, read_checkpoint, whole_array

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
            held += parts.regions(found, g)
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

"""Writes a section of llama.cpp's session files: cells, keys and values of one of its caches."""

import dataclasses
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from kvrt.arrays import Bool
from kvrt.config import GroupSpec
from kvrt.session import kv_arrays
from kvrt.session.change import recode
from kvrt.session.interop import foreign
from kvrt.session.interop.llama_format import GGML_IDS, Place, layout, unit
from kvrt.session.owners import Owned
from kvrt.session.snapshot import Snapshot
from kvrt.store.codec import Quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """How all sections of a file are written.

    Attributes:
      groups: of the model.
      arch: its architecture, by llama.cpp's name.
      types: KV dtypes of keys and of values.
      rotations: sizes of the rotations of both; nothing in the older version.
    """

    groups: Sequence[GroupSpec]
    arch: str
    types: Sequence[str]
    rotations: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenCells:
    """The layers of a section, its cells as they are written, and which of the groups' they are."""

    places: Sequence[Place]
    owned: Owned
    keep: Bool[np.ndarray, " n"]


def section(snapshot: Snapshot, part: WrittenCells, how: Written) -> Iterator[bytes]:
    """The section of some layers of a snapshot."""
    yield struct.pack("<II", 1, len(part.owned.pos))
    yield _cells(part.owned)
    yield struct.pack("<II", 0, len(part.places)) + how.rotations
    for values, name in enumerate(how.types):
        yield from _layers(snapshot, part, how, name, values=bool(values))


def _cells(owned: Owned) -> bytes:
    """Position, number of owners and owners of each cell."""
    n, n_owners = len(owned.pos), np.bincount(owned.cell, minlength=len(owned.pos))
    start = np.cumsum(2 + n_owners) - n_owners - 2
    words = np.empty(2 * n + len(owned.seq), "<i4")
    words[start], words[start + 1] = owned.pos, n_owners
    listed = np.ones(len(words), bool)
    listed[start] = listed[start + 1] = False
    words[listed] = owned.seq
    return words.tobytes()


def _layers(
    snapshot: Snapshot, part: WrittenCells, how: Written, name: str, *, values: bool
) -> Iterator[bytes]:
    """Keys or values of each layer of a section."""
    for place in part.places:
        group, start = how.groups[place.group], 0
        order = None
        if group.rope is not None and not values:
            order = foreign.order(group.rope.layout, layout(how.arch), group)
        dtype, size = unit(name)
        cell_bytes = group.n_kv_heads * group.head_dim // size * dtype.itemsize
        yield struct.pack("<iQ", GGML_IDS[name], cell_bytes)
        n_hadamard = kv_arrays.kinds(snapshot.fingerprint, place.group)[values].n_hadamard
        for block in snapshot.groups[place.group].blocks:
            found = block.v if values else block.k
            found = kv_arrays.on_host(found)
            if order is not None:
                found = recode.reordered(found, order, n_hadamard)
            kv = kv_arrays.to_q8_0(found, dtype) if isinstance(found, Quantized) else found
            kv = np.asarray(kv)[place.index]
            kv = kv.view(dtype) if name == "bf16" else kv  # which a runtime keeps as bits
            assert kv.dtype == dtype, (kv.dtype, name)
            keep, start = part.keep[start : start + len(kv)], start + len(kv)
            yield kv[keep].tobytes()

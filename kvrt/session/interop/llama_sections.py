"""A section of llama.cpp's session files, read and written: cells, keys and values of a cache.

See `llama_format` for what stands around it.
"""

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.config import MAX_SEQUENCES, GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import kv_arrays, owners
from kvrt.session.change import edit
from kvrt.session.interop import foreign
from kvrt.session.interop.foreign import DTYPES, KVElements
from kvrt.session.interop.llama_format import GGML_IDS, Q8_0, Place, layout, type_name, unit
from kvrt.session.interop.source import Source
from kvrt.session.owners import Owned
from kvrt.session.snapshot import Snapshot
from kvrt.store.codec import AnyKVArray, Quantized

_CELL = np.dtype("<i4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOf:
    """What a file is of, as its reader knows it.

    Attributes:
      groups: of the model.
      arch: its architecture, by llama.cpp's name.
      whole: all sequences, with their numbers.
      new: of the version that says how quantized keys and values were rotated.
    """

    groups: Sequence[GroupSpec]
    arch: str
    whole: bool
    new: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One of llama.cpp's caches.

    Attributes:
      owned: cells.
      types: of K and V, "" without cells.
      rotations: channels of K and V in one Hadamard transform, None where the file does not say.
      k: keys by group.
      v: values by group.
    """

    owned: Owned
    types: tuple[str, str]
    rotations: tuple[int, int] | None
    k: dict[int, AnyKVArray]
    v: dict[int, AnyKVArray]


def read_section(at: Source, places: Sequence[Place], of: FileOf) -> Section:
    """The section of such layers.

    Raises:
      BadSession: it is damaged.
      SessionMismatch: it is of another model, or of a kind of cache that is not known here.
    """
    groups = of.groups
    n_streams = at.number("u4", "the number of streams")
    if n_streams != 1:
        raise SessionMismatch(
            f"{at.name}: {n_streams} streams are not supported, only 1; save it from a unified "
            "cache (-kvu) or one slot (-np 1)"
        )
    owned = _owned(at, at.number("u4", "the number of cells"), whole=of.whole)
    n = len(owned.pos)
    if not n:
        used = {p.group for p in places}
        empty: dict[int, AnyKVArray] = {g: _empty(groups[g], 0, DTYPES["f32"]) for g in used}
        return Section(owned=owned, types=("", ""), rotations=None, k=empty, v=empty)
    trans, rotations = _layout(at, len(places), new=of.new)
    type_k, k = _layers(at, "keys", n, places, groups, trans=False)
    type_v, v = _layers(at, "values", n, places, groups, trans=trans)
    for g, group in enumerate(groups):
        order = group.rope and foreign.order(layout(of.arch), group.rope.layout, group)
        if g in k and order is not None:
            n_hadamard = rotations[0] if rotations else 0
            k[g] = edit.reordered(k[g], order, n_hadamard)
    return Section(owned=owned, types=(type_k, type_v), rotations=rotations, k=k, v=v)


def _layout(at: Source, n_layers: int, *, new: bool) -> tuple[bool, tuple[int, int] | None]:
    """Whether values are transposed, and sizes of rotations; the number of layers is checked."""
    trans = at.number("u4", "the layout of values")
    if trans not in (0, 1):
        raise BadSession(f"{at.name}: layout {trans} of values, 0 or 1 is known; make it again")
    found = at.number("u4", "the number of layers")
    if found != n_layers:
        raise SessionMismatch(
            f"{at.name}: keys and values of {found} layers, the model has {n_layers} of their "
            "kind; take the model that made it"
        )
    if not new:
        return trans == 1, None
    n_k, n_v = at.array(2, np.dtype("u4"), "the sizes of rotations").tolist()
    return trans == 1, (n_k, n_v)


def _owned(at: Source, n: int, *, whole: bool) -> Owned:
    """Positions and owners of n cells."""
    at.need(12 * n, f"{n:,} cells")
    table = at.array(3 * n, _CELL, "cells").reshape(n, 3)
    if (table[:, 1] == 1).all():
        pos, cell, seq = table[:, 0], np.arange(n, dtype=np.int32), table[:, 2]
    else:
        at.back(12 * n)
        pos, cell, seq = _listed(at, n)
    if not whole:
        if len(seq) != n:
            raise BadSession(f"{at.name}: {len(seq)} owners of {n} cells in a file of one sequence")
        seq = np.zeros_like(seq)
    owned = Owned(pos=pos.astype(np.int32), cell=cell, seq=seq.astype(np.int32))
    owners.check_owned(at.name, owned)
    return owned


def _listed(at: Source, n: int) -> tuple[Int32[np.ndarray, " n"], ...]:
    """Positions, and cells and owners in pairs, of cells that do not have one owner each."""
    pos, cell, seq = [], [], []
    for i in range(n):
        pos.append(at.number("i4", "a position"))
        n_seq = at.number("u4", "the number of owners")
        if not 1 <= n_seq <= MAX_SEQUENCES:
            raise BadSession(
                f"{at.name}: cell {i} has {n_seq} owners, [1, {MAX_SEQUENCES}] is allowed; the "
                "file is damaged, make it again"
            )
        ids = at.array(n_seq, _CELL, "owners").tolist()
        if any(a >= b for a, b in pairwise(ids)):
            raise BadSession(f"{at.name}: owners of cell {i} do not ascend; make it again")
        cell += [i] * n_seq
        seq += ids
    return np.array(pos, np.int32), np.array(cell, np.int32), np.array(seq, np.int32)


def _layers(
    at: Source,
    what: str,
    n: int,
    places: Sequence[Place],
    groups: Sequence[GroupSpec],
    *,
    trans: bool,
) -> tuple[str, dict[int, AnyKVArray]]:
    """Keys or values of n cells in every layer of a section, and their type."""
    first = ""
    kv: dict[int, KVElements] = {}
    for place in places:
        group, layer = groups[place.group], f"{what} of layer {place.layer}"
        name = _type(at, layer, group, trans=trans)
        if name != (first := first or name):
            raise BadSession(f"{at.name}: {layer} are {name}, others {first}; make it again")
        dtype, size = unit(name)
        if place is places[0]:
            widths = sum(groups[p.group].n_kv_heads * groups[p.group].head_dim for p in places)
            at.need(n * widths // size * dtype.itemsize, what)
            kv = {g: _empty(groups[g], n, dtype, size) for g in {p.group for p in places}}
        found = at.array(n * group.n_kv_heads * group.head_dim // size, dtype, layer)
        found = found.reshape(-1, n).T if trans else found
        foreign.check_finite(at.name, layer, found["scale"] if size > 1 else found)
        kv[place.group][place.index] = found.reshape(n, group.n_kv_heads, group.head_dim // size)
    return first, {g: kv_arrays.from_q8_0(x) if x.dtype == Q8_0 else x for g, x in kv.items()}


def _type(at: Source, layer: str, group: GroupSpec, *, trans: bool) -> str:
    """The dtype of a layer's keys or values, after their width was checked."""
    name = type_name(at.name, at.number("i4", f"the type of {layer}"))
    width, (dtype, channels) = group.n_kv_heads * group.head_dim, unit(name)
    if channels > 1 and (trans or group.head_dim % channels):
        raise SessionMismatch(
            f"{at.name}: {layer} are {name}, and a group of {channels} channels is not of one head "
            "and cell; save it from a cache of type f16 (-ctk f16 -ctv f16)"
        )
    if trans:
        size = at.number("u4", f"the size of {layer}")
        n_bytes = size * at.number("u4", f"the width of {layer}")
    else:
        n_bytes = size = at.number("u8", f"the size of {layer}")
    wanted = width // channels * dtype.itemsize
    if n_bytes != wanted or (trans and size != dtype.itemsize):
        raise SessionMismatch(
            f"{at.name}: {layer} have {n_bytes:,} bytes a cell, the model's {wanted:,} "
            f"({width} of {name}); take the model that made it"
        )
    return name


def _empty(group: GroupSpec, n: int, dtype: np.dtype, size: int = 1) -> KVElements:
    return np.empty((len(group.layers), n, group.n_kv_heads, group.head_dim // size), dtype)


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
        yield from _written_layers(snapshot, part, how, name, values=bool(values))


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


def _written_layers(
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
                found = edit.reordered(found, order, n_hadamard)
            kv = kv_arrays.to_q8_0(found, dtype) if isinstance(found, Quantized) else found
            kv = np.asarray(kv)[place.index]
            kv = kv.view(dtype) if name == "bf16" else kv  # which a runtime keeps as bits
            assert kv.dtype == dtype, (kv.dtype, name)
            keep, start = part.keep[start : start + len(kv)], start + len(kv)
            yield kv[keep].tobytes()

"""Reads session files of llama.cpp; see `llama_format` for their parts."""

import dataclasses
import os
import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvrt.arrays import Int32
from kvrt.config import MAX_SEQUENCES, GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import kv_arrays, owners
from kvrt.session.change import recode
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.interop import foreign, llama_hadamard, source
from kvrt.session.interop.foreign import DTYPES, KVElements, Tokens
from kvrt.session.interop.llama_format import (
    Q8_0,
    SEQUENCE,
    VERSIONS,
    WHOLE,
    Place,
    architecture,
    layout,
    sections,
    type_name,
    unit,
)
from kvrt.session.interop.llama_hadamard import SectionTypes
from kvrt.session.interop.llama_slot import read_checkpoints, read_tokens
from kvrt.session.interop.llama_states import check_ends, read_states
from kvrt.session.owners import Owned
from kvrt.session.snapshot import GroupPart, Snapshot, StatePart
from kvrt.store.codec import AnyKVArray

_CELL = np.dtype("<i4")
_MAX_ARCH_BYTES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Section:
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


def read(
    path: str | os.PathLike[str],
    fingerprint: Fingerprint,
    groups: Sequence[GroupSpec],
    *,
    arch: str,
    n_vocab: int,
    tokens: Tokens | None = None,
    hadamard: bool | None = None,
) -> Snapshot:
    """Reads a whole-session file, or a file of one sequence, which becomes sequence 0.

    Nothing is changed by a file that is refused, and no more memory is taken than the file has
    bytes, a few times over. Keys and values keep the file's dtype; llama.cpp notes no weights and
    no RoPE, so nobody can tell a file of another model of the same shape. Of q8_0 they keep their
    bytes, but for keys of a model whose channels stand in another order here: these are quantized
    again.

    Args:
      path: of the file.
      fingerprint: of the cache that will go on.
      groups: of the model.
      arch: the model's architecture, as llama.cpp or Hugging Face name it.
      n_vocab: tokens of the model.
      tokens: by sequence, the tokens of its positions, in place of what the file says; a file
        names those of one sequence.
      hadamard: whether llama.cpp applied it before it quantized, where a file of the older version
        does not say so: it does since April 2026, unless LLAMA_ATTN_ROT_DISABLE is set.

    Raises:
      BadSession: the file is damaged, truncated or no session, or its tokens do not fit its cells.
      SessionMismatch: it is of another version, model or kind of cache.
    """
    foreign.refuse_caches(fingerprint, groups, "a session file of llama.cpp")
    arch, places = architecture(arch), sections(groups)
    with source.open_source(path) as at:
        kind, new = _kind(at)
        ids = read_tokens(at)
        if kind == WHOLE:
            _check_arch(at, arch)
        found = [_section(at, of, groups, arch, kind, new=new) for of in places]
        states = read_states(at, fingerprint, groups, whole=kind == WHOLE)
        head_dims = [g.head_dim for g in groups]
        is_rotated = llama_hadamard.found(at.name, _types(found), head_dims, hadamard)
        checkpoints = read_checkpoints(at, fingerprint, groups) if kind == SEQUENCE else ()
        at.end()
        name, given = at.name, tokens or {}
    lost = _check_windows(name, found, places, groups)
    owned = found[0].owned if found else _by_states(name, states, ids, given)
    n_words = owners.n_words(owned)
    parts = {
        g: _part(section, g, n_words, lost if groups[g].mask.kind != "full" else {})
        for section in found
        for g in section.k
    }
    types = next((s.types for s in found if s.types[0]), None)
    if types is not None:
        types_here = {"type_k": types[0], "type_v": types[1], "hadamard": is_rotated}
        fingerprint = {**fingerprint, **types_here}
    ordered = tuple(parts[g] for g in range(len(groups)))
    history = foreign.history_of(name, owned, ids, given, n_vocab)
    owners.check_cells(name, ordered, history)
    check_ends(name, states, {s: int(owned.pos[owned.of(s)][-1]) for s in owned.seq_ids})
    n_past = int(owned.pos.max(initial=-1)) + 1
    return Snapshot(
        fingerprint=fingerprint,
        groups=ordered,
        states=states,
        checkpoints=tuple(x for x in checkpoints if x.pos <= n_past),
        history=history,
        ga_i={},
        logits={},
    )


def _by_states(name: str, states: StatePart | None, ids: Sequence[int], given: Tokens) -> Owned:
    """A cell a token, for a model whose layers all keep states instead."""
    assert states is not None, "a model has layers"
    ends = {s: kept[-1][0] for s, kept in sorted(states.held.items())}
    for s, end in ends.items():
        if end >= len(given.get(s, ids)):
            raise BadSession(
                f"{name}: the state of sequence {s} is of position {end}, and there are "
                f"{len(given.get(s, ids))} tokens; give the tokens of its positions"
            )
    pos = [np.arange(end + 1, dtype=np.int32) for end in ends.values()]
    seq = [np.full(end + 1, s, np.int32) for s, end in ends.items()]
    pos, seq = np.concatenate(pos), np.concatenate(seq)
    return Owned(pos=pos, cell=np.arange(len(pos), dtype=np.int32), seq=seq)


def _types(found: Sequence[_Section]) -> list[SectionTypes]:
    return [SectionTypes(types=s.types, rotations=s.rotations) for s in found if s.types[0]]


def _kind(at: source.Source) -> tuple[int, bool]:
    """Which kind of file it is, and whether of the newer version."""
    magic = at.number("u4", "the magic number")
    if magic not in VERSIONS:
        raise BadSession(
            f"{at.name}: begins with {struct.pack('<I', magic)!r}, a session of llama.cpp with "
            f"{struct.pack('<I', WHOLE)!r} or {struct.pack('<I', SEQUENCE)!r}; give another file"
        )
    version = at.number("u4", "the version")
    old, new = VERSIONS[magic]
    if version not in (old, new):
        kind = "a whole session" if magic == WHOLE else "one sequence"
        raise SessionMismatch(
            f"{at.name}: version {version} of llama.cpp's file of {kind} is not supported, only "
            f"{old} and {new}; save it again with a llama.cpp from late in 2026"
        )
    return magic, version == new


def _check_arch(at: source.Source, arch: str) -> None:
    n = at.number("u4", "the architecture's length")
    if n > _MAX_ARCH_BYTES:
        raise BadSession(
            f"{at.name}: the architecture's name has {n} bytes, the limit is {_MAX_ARCH_BYTES}; "
            "the file is damaged, make it again"
        )
    found = at.take(n, "the architecture").decode(errors="backslashreplace")
    if found != arch:
        raise SessionMismatch(
            f"{at.name}: of architecture {found!r}, the model is {arch!r}; take the model that "
            "made it"
        )


def _section(
    at: source.Source,
    places: Sequence[Place],
    groups: Sequence[GroupSpec],
    arch: str,
    kind: int,
    *,
    new: bool,
) -> _Section:
    n_streams = at.number("u4", "the number of streams")
    if n_streams != 1:
        raise SessionMismatch(
            f"{at.name}: {n_streams} streams are not supported, only 1; save it from a unified "
            "cache (-kvu) or one slot (-np 1)"
        )
    owned = _owned(at, at.number("u4", "the number of cells"), whole=kind == WHOLE)
    n = len(owned.pos)
    if not n:
        used = {p.group for p in places}
        empty: dict[int, AnyKVArray] = {g: _empty(groups[g], 0, DTYPES["f32"]) for g in used}
        return _Section(owned=owned, types=("", ""), rotations=None, k=empty, v=empty)
    trans, rotations = _layout(at, len(places), new=new)
    type_k, k = _layers(at, "keys", n, places, groups, trans=False)
    type_v, v = _layers(at, "values", n, places, groups, trans=trans)
    for g, group in enumerate(groups):
        order = group.rope and foreign.order(layout(arch), group.rope.layout, group)
        if g in k and order is not None:
            n_hadamard = rotations[0] if rotations else 0
            k[g] = recode.reordered(k[g], order, n_hadamard)
    return _Section(owned=owned, types=(type_k, type_v), rotations=rotations, k=k, v=v)


def _layout(at: source.Source, n_layers: int, *, new: bool) -> tuple[bool, tuple[int, int] | None]:
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


def _owned(at: source.Source, n: int, *, whole: bool) -> Owned:
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


def _listed(at: source.Source, n: int) -> tuple[Int32[np.ndarray, " n"], ...]:
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
    at: source.Source,
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


def _type(at: source.Source, layer: str, group: GroupSpec, *, trans: bool) -> str:
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


def _check_windows(
    name: str,
    found: Sequence[_Section],
    places: Sequence[Sequence[Place]],
    groups: Sequence[GroupSpec],
) -> dict[int, foreign.Intervals]:
    """What windowed layers lack, by sequence."""
    if not places:
        return {}
    masks = [groups[of[0].group].mask for of in places]
    if len({section.types for section in found if section.types[0]}) > 1:
        raise BadSession(f"{name}: sections differ in their KV dtype; make the file again")
    if len(found) == 2:
        return foreign.lost(name, found[1].owned, found[0].owned, masks[1])
    beyond = int(found[0].owned.pos.max(initial=-1))
    if masks[0].kind != "full" and beyond >= masks[0].size:
        raise SessionMismatch(
            f"{name}: llama.cpp has no windows where all layers have one, and positions go to "
            f"{beyond}; only files within the window of {masks[0].size} tokens are the same"
        )
    return {}


def _part(
    section: _Section, group: int, n_words: int, lost: dict[int, foreign.Intervals]
) -> GroupPart:
    n = len(section.owned.pos)
    return GroupPart(
        n_cells=n,
        head=0,
        index=np.arange(n, dtype=np.int32),
        pos=section.owned.pos,
        seqs=owners.owner_words(section.owned, n_words),
        lost=lost,
        blocks=foreign.blocks(section.k[group], section.v[group], n),
    )

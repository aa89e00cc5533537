"""Reads and writes session files of llama.cpp, and slots of its server; see `llama_format`.

What is written is what every llama.cpp loads that keeps values cell by cell, with flash attention
on or left to choose: one stream, and of windowed layers only what is still seen.

Source: llama.cpp `server-task.cpp` (server_tokens).
"""

import dataclasses
import os
import struct
from collections.abc import Sequence
from io import BufferedIOBase

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache.history import entries, positions
from kvrt.config import GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import owners
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.interop import foreign, llama_hadamard, source
from kvrt.session.interop.foreign import Tokens
from kvrt.session.interop.llama_checkpoints import read_checkpoints, write_checkpoints
from kvrt.session.interop.llama_format import (
    GGML_IDS,
    SEQUENCE,
    SLOT_MARK,
    SLOT_VERSION,
    VERSIONS,
    WHOLE,
    Place,
    architecture,
    sections,
)
from kvrt.session.interop.llama_hadamard import SectionTypes
from kvrt.session.interop.llama_sections import (
    FileOf,
    Section,
    Written,
    WrittenCells,
    read_section,
    section,
)
from kvrt.session.interop.llama_states import check_ends, read_states, write_states
from kvrt.session.interop.rotated_keys import with_rotated_keys
from kvrt.session.interop.source import Source
from kvrt.session.owners import Owned
from kvrt.session.snapshot import GroupPart, Snapshot, StatePart, packed_part

_MAX_ARCH_BYTES = 64
# llama.cpp's server evaluates a prompt anew where windowed layers lack the position before these.
_N_MORE = 1


def read_tokens(at: Source) -> Sequence[int]:
    """The tokens, also where a server has packed them.

    Raises:
      BadSession: they are damaged.
      SessionMismatch: of a version that is not known, or with media.
    """
    n = at.number("u4", "the number of tokens")
    words = at.array(n, np.dtype("<i4"), "the tokens").tolist()
    if not words or words[0] != SLOT_MARK:
        return words
    if len(words) < 4:
        raise BadSession(f"{at.name}: the server's tokens end after {n} words; make it again")
    version, n_tokens = words[1:3]
    if version != SLOT_VERSION:
        raise SessionMismatch(
            f"{at.name}: version {version} of the server's tokens is not supported, only "
            f"{SLOT_VERSION}; save the slot again with another llama.cpp"
        )
    if not 0 <= n_tokens <= n - 4:
        raise BadSession(
            f"{at.name}: the server names {n_tokens} tokens in {n} words; the file is damaged, "
            "make it again"
        )
    rest = words[3 + n_tokens :]
    if rest[0] > 0:
        raise SessionMismatch(
            f"{at.name}: {rest[0]} pieces of pictures or sound are not supported, only text"
        )
    if rest != [0]:
        raise BadSession(f"{at.name}: {len(rest)} words follow the server's tokens, 1 is allowed")
    return words[3 : 3 + n_tokens]


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
        of = FileOf(groups=groups, arch=arch, whole=kind == WHOLE, new=new)
        found = [read_section(at, x, of) for x in places]
        states = read_states(at, fingerprint, groups, whole=kind == WHOLE)
        is_rotated = llama_hadamard.found(at.name, _types(found), groups, hadamard)
        checkpoints = read_checkpoints(at, fingerprint, found, of) if kind == SEQUENCE else ()
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


def _types(found: Sequence[Section]) -> list[SectionTypes]:
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


def _check_windows(
    name: str,
    found: Sequence[Section],
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
    section: Section, group: int, n_words: int, lost: dict[int, foreign.Intervals]
) -> GroupPart:
    pos = section.owned.pos
    blocks = foreign.blocks(section.k[group], section.v[group], len(pos))
    part = packed_part(pos, lost, blocks)
    return dataclasses.replace(part, seqs=owners.owner_words(section.owned, n_words))


def write(
    file: BufferedIOBase,
    snapshot: Snapshot,
    groups: Sequence[GroupSpec],
    *,
    arch: str,
    whole: bool,
    seq_id: int | None = None,
    old: bool = False,
) -> None:
    """Writes a whole-session file, or a file of one sequence, in the dtypes of its keys and values.

    llama.cpp keeps no logits: who loads the file evaluates the newest token again.

    Args:
      file: open for writing; all checks come before the first byte.
      snapshot: what is written.
      groups: of the model.
      arch: the model's architecture, as llama.cpp or Hugging Face name it.
      whole: all sequences, whose tokens llama.cpp notes for one alone, so that the others must be
        parts of the lowest one.
      seq_id: the one sequence, where `whole` is not wanted; None is the only one.
      old: for a llama.cpp before 0.6, of October 2026: versions 10 and 3 instead of 11 and 4,
        which do not say whether q8_0 was rotated before it was quantized. Where they do, llama.cpp
        refuses what it does otherwise: it rotates heads of multiples of 64, and with
        LLAMA_ATTN_ROT_DISABLE=1 none.

    Raises:
      UsageError: which sequence is wanted is not said, or it is empty.
      SessionMismatch: llama.cpp has no such dtypes, positions or layers.
    """
    foreign.refuse_latents(groups, "a session file of llama.cpp")
    arch = architecture(arch)
    snapshot = with_rotated_keys(snapshot, groups, "a session file of llama.cpp")
    only = foreign.chosen(snapshot, seq_id, whole=whole)
    parts = [_kept(snapshot, places, groups, only) for places in sections(groups)]
    tokens = _tokens(snapshot, parts[0].owned if parts else _of_states(snapshot, only))
    states = list(write_states(snapshot, groups, only))
    types = [
        foreign.kv_dtype(snapshot, which, GGML_IDS, "llama.cpp") for which in ("type_k", "type_v")
    ]
    rotations = llama_hadamard.written(snapshot.fingerprint, groups, types, old=old)
    how = Written(groups=groups, arch=arch, types=types, rotations=b"" if old else rotations)
    if only is not None:
        states += write_checkpoints(snapshot, only, how)
    magic = WHOLE if whole else SEQUENCE
    file.write(struct.pack("<III", magic, VERSIONS[magic][not old], len(tokens)))
    file.write(tokens.astype("<i4").tobytes())
    if whole:
        file.write(struct.pack("<I", len(arch)) + arch.encode())
    for part in parts:
        for piece in section(snapshot, part, how):
            file.write(piece)
    for piece in states:
        file.write(piece)


def _of_states(snapshot: Snapshot, only: int | None) -> Owned:
    """A cell a token of the one sequence of a model whose layers all keep states instead."""
    seqs = list(snapshot.seq_ids) if only is None else [only]
    pos = [positions(snapshot.history, s) for s in seqs]
    if len(seqs) > 1 or not np.array_equal(pos[0], np.arange(len(pos[0]))):
        raise SessionMismatch(
            f"sequences {seqs} of a model without attention: llama.cpp's file notes the tokens of "
            "one, at 0, 1, 2 and so on; write one sequence a file"
        )
    number = np.arange(len(pos[0]), dtype=np.int32)
    return Owned(pos=pos[0], cell=number, seq=np.full(len(number), seqs[0], np.int32))


def _kept(
    snapshot: Snapshot, places: Sequence[Place], groups: Sequence[GroupSpec], only: int | None
) -> WrittenCells:
    """Cells of a section."""
    part, mask = snapshot.groups[places[0].group], groups[places[0].group].mask
    for other in (snapshot.groups[place.group] for place in places):
        same = np.array_equal(part.pos, other.pos) and np.array_equal(part.seqs, other.seqs)
        if not same:
            raise SessionMismatch(
                "layers that llama.cpp keeps in one cache have other cells here; pack the cells "
                "first, with defrag"
            )
    owned = owners.owners_of(part.pos, part.seqs)
    if only is not None:
        mine = owned.seq == only
        owned = dataclasses.replace(owned, cell=owned.cell[mine], seq=owned.seq[mine])
    keep = np.zeros(len(part.pos), bool)
    keep[owned.cell] = True
    twice = owners.twice(owned)
    if twice is not None:
        raise SessionMismatch(
            f"two cells of sequence {twice[0]} at position {twice[1]}: llama.cpp's files hold one; "
            "positions that tokens share, as SelfExtend makes them, stay in kvrt's own"
        )
    if mask.kind != "full" and any(group.mask.kind == "full" for group in groups):
        keep &= ~foreign.unseen(owned, mask, _N_MORE)
    elif mask.kind != "full":
        _check_within(part, mask.size)
    return WrittenCells(places=places, owned=owners.narrowed(owned, keep), keep=keep)


def _check_within(part: GroupPart, size: int) -> None:
    """Refuses what llama.cpp would see beyond a window that it does not have."""
    beyond = int(part.pos.max(initial=-1))
    if beyond >= size or part.lost:
        raise SessionMismatch(
            f"llama.cpp has no windows where all layers have one: positions go to {beyond}, the "
            f"window is {size}; only sessions within it can be written"
        )


def _tokens(snapshot: Snapshot, owned: Owned) -> Int32[np.ndarray, " n"]:
    """Tokens of the lowest sequence, which must have all that others have."""
    made = np.full(len(owned.pos), -1, np.int32)
    for i, s in enumerate(owned.seq_ids):
        cells, held = owned.of(s), entries(snapshot.history, s)
        if not np.array_equal(held[0], owned.pos[cells]):
            raise SessionMismatch(
                f"{held.shape[1]} tokens and {len(cells)} cells of sequence {s} do not stand at "
                "the same positions; llama.cpp's files need a cell of each token"
            )
        if i == 0:
            made[cells] = held[1]
        if not np.array_equal(made[cells], held[1]):
            raise SessionMismatch(
                f"sequence {s} has tokens that sequence {owned.seq_ids[0]} does not have, and "
                "llama.cpp's file of a whole session notes those of one; write one sequence a file"
            )
    return made[owned.of(owned.seq_ids[0])]

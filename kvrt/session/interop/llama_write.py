"""Writes session files that llama.cpp reads; see `llama_format` for their parts.

What is written is what every llama.cpp loads that keeps values cell by cell, with flash attention
on or left to choose: one stream, and of windowed layers only what is still seen.
"""

import dataclasses
import struct
from collections.abc import Sequence
from io import BufferedIOBase

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache.history import entries, positions
from kvrt.config import GroupSpec
from kvrt.errors import SessionMismatch
from kvrt.session import owners
from kvrt.session.interop import foreign, llama_hadamard
from kvrt.session.interop.llama_checkpoints import write_checkpoints
from kvrt.session.interop.llama_format import (
    GGML_IDS,
    SEQUENCE,
    VERSIONS,
    WHOLE,
    Place,
    architecture,
    sections,
)
from kvrt.session.interop.llama_sections import Written, WrittenCells, section
from kvrt.session.interop.llama_states import write_states
from kvrt.session.interop.rotated_keys import with_rotated_keys
from kvrt.session.owners import Owned
from kvrt.session.snapshot import GroupPart, Snapshot

# llama.cpp's server evaluates a prompt anew where windowed layers lack the position before these.
_N_MORE = 1


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

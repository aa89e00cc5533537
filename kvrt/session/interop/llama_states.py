"""States of recurrent layers in llama.cpp's session files, behind the sections of keys and values.

    cells     how many; of each its position, how many owners, and which
    0         states are never transposed
    layers    how many the model has, those with attention too
    r         of each recurrent layer: type, bytes a cell, and of each cell the window of the
              convolution: channel by channel, the oldest token first
    s         likewise the state, in the order that it has here

A cell is the newest state of its owners, at the position of their last token. In a file of one
sequence it names no owner. All numbers are float32.

Source: llama.cpp `llama-memory-recurrent.cpp`.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvrt.cellcache.history import positions
from kvrt.cellcache.saved import KeptStates
from kvrt.config import MAX_POS, MAX_SEQUENCES, GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import described
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.interop import foreign
from kvrt.session.interop.source import Source
from kvrt.session.snapshot import CheckpointPart, Snapshot, StatePart

_F32 = 0
_TYPE = np.dtype(np.float32)
Shapes = Sequence[tuple[int, ...]]


def write_states(
    snapshot: Snapshot, groups: Sequence[GroupSpec], only: int | None
) -> Iterator[bytes]:
    """The section of states; nothing for a model without.

    Args:
      snapshot: what is written.
      groups: of the model's attention layers.
      only: the one sequence, None for all.

    Raises:
      SessionMismatch: a sequence has no state of its last token, or llama.cpp has no such states.
    """
    states = snapshot.states
    if states is None:
        return
    cells = _cells(snapshot, states, only)
    used = [at for _, at in cells]
    tables = [[np.asarray(t)[used] for t in layer] for layer in states.tables]
    listed = [(pos, seqs if only is None else []) for (pos, _), seqs in cells.items()]
    yield from _section(snapshot.fingerprint, groups, listed, tables)


def checkpoint_section(
    snapshot: Snapshot, groups: Sequence[GroupSpec], part: CheckpointPart
) -> Iterator[bytes]:
    """The same of a checkpoint, which is of one sequence."""
    assert part.state is not None
    tables = [[np.asarray(x)[None] for x in layer] for layer in part.state]
    yield from _section(snapshot.fingerprint, groups, [(part.pos - 1, [])], tables)


def _section(
    said: Fingerprint,
    groups: Sequence[GroupSpec],
    cells: Sequence[tuple[int, Sequence[int]]],
    tables: Sequence[Sequence[np.ndarray]],
) -> Iterator[bytes]:
    """Positions and owners of cells, and their states by layer and part."""
    n_recurrent, shapes = _shapes(said)
    yield struct.pack("<I", len(cells))
    for pos, seqs in cells:
        yield struct.pack(f"<iI{len(seqs)}i", pos, len(seqs), *seqs)
    yield struct.pack("<II", 0, n_recurrent + sum(len(g.layers) for g in groups))
    for part, shape in enumerate(shapes):
        for layer in tables:
            rows = layer[part].swapaxes(1, 2) if part == 0 else layer[part]
            yield struct.pack("<iQ", _F32, math.prod(shape) * _TYPE.itemsize)
            yield np.ascontiguousarray(rows, "<f4").tobytes()


def read_states(
    at: Source, fingerprint: Fingerprint, groups: Sequence[GroupSpec], *, whole: bool
) -> StatePart | None:
    """The section of states; None for a model without.

    Raises:
      BadSession: it is damaged.
      SessionMismatch: it is of another model.
    """
    if fingerprint["recurrent"] is None:
        return None
    n_recurrent, shapes = _shapes(fingerprint)
    held = _held(at, whole=whole)
    n_layers = n_recurrent + sum(len(g.layers) for g in groups)
    trans = at.number("u4", "the layout of states")
    found = at.number("u4", "the number of layers")
    if trans != 0 or found != n_layers:
        raise SessionMismatch(
            f"{at.name}: states of {found} layers in layout {trans}, the model has {n_layers} in "
            "layout 0; take the model that made it"
        )
    n = 1 + max((at for kept in held.values() for _, at in kept), default=-1)
    parts = [
        [_rows(at, n, shape, layer, is_window=part == 0) for layer in range(n_recurrent)]
        for part, shape in enumerate(shapes)
    ]
    return StatePart(held=held, tables=tuple(zip(*parts, strict=True)))


def check_ends(name: str, states: StatePart | None, ends: Mapping[int, int]) -> None:
    """Refuses states that are not of each sequence's last token.

    Args:
      name: of the file.
      states: found there.
      ends: the last position of each sequence.

    Raises:
      BadSession: they are of other positions or sequences.
    """
    if states is None:
        return
    found = {s: kept[-1][0] for s, kept in states.held.items()}
    if found != ends:
        raise BadSession(
            f"{name}: states of the positions {_brief(found)}, the sequences end at "
            f"{_brief(ends)}; the file is damaged, make it again"
        )


def _shapes(said: Fingerprint) -> tuple[int, Shapes]:
    """Recurrent layers, and the shapes of a state's parts."""
    layers = described.state_arrays(said)
    shapes = [x.shape for x in layers[0]]
    if len({*layers}) > 1 or len(shapes) != 2 or len(shapes[0]) != 2:
        raise SessionMismatch(
            f"states of shapes {list(shapes)} are not those of llama.cpp: a convolution's window "
            "and a state; keep the session in kvrt's own format"
        )
    return len(layers), shapes


def _cells(
    snapshot: Snapshot, states: StatePart, only: int | None
) -> dict[tuple[int, int], list[int]]:
    """The newest states, by position and index, and their owners."""
    out: dict[tuple[int, int], list[int]] = {}
    for s in snapshot.seq_ids if only is None else [only]:
        kept, end = states.held.get(s, ()), int(positions(snapshot.history, s)[-1])
        if not kept or kept[-1][0] != end:
            raise SessionMismatch(
                f"sequence {s} ends at position {end}, and there is no state of that token; "
                "evaluate a token and save it again"
            )
        out.setdefault(kept[-1], []).append(s)
    return out


def _held(at: Source, *, whole: bool) -> dict[int, KeptStates]:
    """By sequence, position and index of its state."""
    n, held = at.number("u4", "the number of states"), dict[int, KeptStates]()
    if n > MAX_SEQUENCES or (not whole and n != 1):
        allowed = f"[0, {MAX_SEQUENCES}]" if whole else "1"
        raise BadSession(f"{at.name}: {n} states, {allowed} is allowed; make the file again")
    for i in range(n):
        pos = at.number("i4", "the position of a state")
        n_owners = at.number("u4", "the number of owners")
        most = MAX_SEQUENCES if whole else 0
        if not 0 <= pos < MAX_POS or not bool(most) <= n_owners <= most:
            raise BadSession(
                f"{at.name}: state {i} at position {pos} has {n_owners} owners; the file is "
                "damaged, make it again"
            )
        for s in at.array(n_owners, np.dtype("i4"), "owners").tolist() if whole else [0]:
            if s in held or not 0 <= s < MAX_SEQUENCES:
                raise BadSession(f"{at.name}: state {i} is of sequence {s}; make the file again")
            held[s] = ((pos, i),)
    return held


def _rows(at: Source, n: int, shape: tuple[int, ...], layer: int, *, is_window: bool) -> np.ndarray:
    """One part of the states of a layer."""
    what = f"{'windows' if is_window else 'states'} of recurrent layer {layer}"
    kind, size = at.number("i4", what), at.number("u8", what)
    wanted = math.prod(shape) * _TYPE.itemsize
    if kind != _F32 or size != wanted:
        raise SessionMismatch(
            f"{at.name}: {what} have {size:,} bytes of type {kind}, the model's {wanted:,} of "
            f"type {_F32}; take the model that made it"
        )
    rows = at.array(n * math.prod(shape), _TYPE, what)
    foreign.check_finite(at.name, what, rows)
    return rows.reshape(n, *shape[::-1]).swapaxes(1, 2) if is_window else rows.reshape(n, *shape)


def _brief(ends: Mapping[int, int]) -> str:
    """The first few sequences and their positions."""
    listed = [f"{s}: {pos}" for s, pos in sorted(ends.items())[:4]]
    return ", ".join(listed) + (" ..." if len(ends) > 4 else "")

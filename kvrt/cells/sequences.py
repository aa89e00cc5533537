"""Sequence operations: rm, cp, keep, add, div and what they ask, llama.cpp's `seq_` family.

Each returns new cells and copies no keys or values. The same function runs on the host, where it
checks its arguments first, and inside jit, where nothing can be raised: there a sequence without a
bit and a reversed range match no cell, and the caller keeps positions below 2^31. `apply` is the
same operations on values of `edits`.

Source: llama.cpp `llama_memory_seq_*`; `seq_div` here adds new - old to delta, so that keys follow
their positions, and cells that sequences share are copied before they move.
"""

import dataclasses
from typing import assert_never

import numpy as np

from kvrt.arrays import AnyArray, Bool, Int32, UInt32, is_host, namespace
from kvrt.cells import checks, slots
from kvrt.cells.cells import (
    Cells,
    Picks,
    any_bit,
    count,
    greatest_pos,
    n_ctx,
    n_free,
    owned,
    picked,
    picks,
    scalar,
    seq_words,
    with_picked,
)
from kvrt.cells.checks import Scalar
from kvrt.cells.edits import Copy, Divide, Keep, Remove, SeqEdit, Shift
from kvrt.config import MAX_POS
from kvrt.errors import CacheFull, SharedCells


def apply(cells: Cells, edit: SeqEdit) -> Cells:
    """The cells after an edit; see the operation of its kind, whose errors it raises."""
    match edit:
        case Remove():
            return seq_rm(cells, edit.seq_id, edit.p0, edit.p1)
        case Copy():
            return seq_cp(cells, edit.src, edit.dst, edit.p0, edit.p1)
        case Keep():
            return seq_keep(cells, edit.seq_id)
        case Shift():
            return seq_add(cells, edit.seq_id, edit.p0, edit.p1, edit.d)
        case Divide():
            return seq_div(cells, edit.seq_id, edit.p0, edit.p1, edit.d)
        case _:
            assert_never(edit)


def clear(cells: Cells) -> Cells:
    """Empties every cell."""
    xp = namespace(cells.pos)
    return Cells(
        pos=xp.full_like(cells.pos, -1),
        delta=xp.zeros_like(cells.delta),
        seqs=xp.zeros_like(cells.seqs),
    )


def seq_rm(cells: Cells, seq_id: Scalar | None, p0: Scalar = 0, p1: Scalar | None = None) -> Cells:
    """Takes positions [p0, p1) from a sequence; a cell without owners becomes empty.

    Args:
      cells: the state.
      seq_id: whose; None frees the cells of the range whoever owns them.
      p0: first position.
      p1: end of the range, exclusive; None is the end of the sequence.

    Raises:
      BadSequence: seq_id has no bit.
      BadRange: the range is reversed, negative or beyond 2^31 - 1.
    """
    hit = _selected(cells, seq_id, p0, p1)
    if seq_id is None:
        return _emptied(cells, hit)
    shared = hit & _shared(cells, seq_id)
    seqs = _without(cells.seqs, shared, seq_words(cells, seq_id))
    return _emptied(dataclasses.replace(cells, seqs=seqs), hit & ~shared)


def seq_cp(
    cells: Cells, src: Scalar, dst: Scalar, p0: Scalar = 0, p1: Scalar | None = None
) -> Cells:
    """Makes dst an owner of src's cells in [p0, p1): shared, not copied.

    dst keeps its own cells, so a dst that was not empty may have a position twice.

    Raises:
      BadSequence: src or dst has no bit.
      BadRange: as in `seq_rm`.
    """
    hit = _selected(cells, src, p0, p1)
    return dataclasses.replace(cells, seqs=_joined(cells.seqs, hit, seq_words(cells, dst)))


def seq_keep(cells: Cells, seq_id: Scalar) -> Cells:
    """Takes every cell from every sequence but seq_id.

    Raises:
      BadSequence: seq_id has no bit.
    """
    mine = owned(cells, seq_id)
    seqs = _without(cells.seqs, mine & _shared(cells, seq_id), ~seq_words(cells, seq_id))
    return _emptied(dataclasses.replace(cells, seqs=seqs), ~mine & (cells.pos >= 0))


def seq_add(cells: Cells, seq_id: Scalar, p0: Scalar, p1: Scalar | None, d: Scalar) -> Cells:
    """Moves positions [p0, p1) of a sequence by d; a cell that would be negative becomes empty.

    Inside jit, cells that another sequence owns as well stay where they are; `n_shared` counts
    them. d = 0 and an empty range change nothing.

    Raises:
      BadSequence: seq_id has no bit.
      BadRange: as in `seq_rm`, or a position would exceed 2^31 - 1.
      SharedCells: the range holds cells that other sequences own as well.
    """
    hit = _selected(cells, seq_id, p0, p1)
    if is_host(cells.pos):
        d = checks.check_distance(d)
        if d == 0:
            return cells
        at = _unshared(cells, seq_id, hit, "seq_add")
        if d > 0:
            checks.check_moved(int(cells.pos[at].max(initial=-1)), d)
    else:
        at = hit & ~_shared(cells, seq_id)
    return _moved(cells, at, picked(cells.pos, at) + d)


def seq_div(cells: Cells, seq_id: Scalar, p0: Scalar, p1: Scalar | None, d: Scalar) -> Cells:
    """Divides positions [p0, p1) of a sequence by d, rounding down; shared cells as in `seq_add`.

    delta grows by new - old, by which the keys have to rotate. Several tokens may end on one
    position; they see each other. d = 1 and an empty range change nothing.

    Raises:
      BadSequence: seq_id has no bit.
      BadRange: as in `seq_rm`, or d is below 1.
      SharedCells: the range holds cells that other sequences own as well.
    """
    hit = _selected(cells, seq_id, p0, p1)
    if is_host(cells.pos):
        d = checks.check_divisor(d)
        if d == 1:
            return cells
        at = _unshared(cells, seq_id, hit, "seq_div")
    else:
        at = hit & ~_shared(cells, seq_id)
    return _moved(cells, at, picked(cells.pos, at) // d)


def seq_pos_min(cells: Cells, seq_id: Scalar) -> int | Int32[AnyArray, ""]:
    """Smallest position of a sequence, -1 if it is empty.

    Raises:
      BadSequence: seq_id has no bit.
    """
    mine = owned(cells, seq_id)
    if is_host(mine):
        pos = cells.pos[picks(mine)]
        return int(pos.min()) if len(pos) else -1
    xp = namespace(cells.pos)
    least = xp.min(xp.where(mine, cells.pos, MAX_POS))
    return scalar(xp.where(xp.any(mine), least, -1))


def seq_pos_max(cells: Cells, seq_id: Scalar) -> int | Int32[AnyArray, ""]:
    """Greatest position of a sequence, -1 if it is empty.

    Raises:
      BadSequence: seq_id has no bit.
    """
    return greatest_pos(cells.pos, owned(cells, seq_id))


def n_shared(
    cells: Cells, seq_id: Scalar, p0: Scalar = 0, p1: Scalar | None = None
) -> int | Int32[AnyArray, ""]:
    """How many cells of a sequence's range [p0, p1) another sequence owns as well.

    Raises:
      BadSequence: seq_id has no bit.
      BadRange: as in `seq_rm`.
    """
    return count(_selected(cells, seq_id, p0, p1) & _shared(cells, seq_id))


def plan_split(
    cells: Cells,
    seq_id: Scalar,
    p0: Scalar,
    p1: Scalar | None,
    head: int,
    kept: Bool[np.ndarray, " C"] | None = None,
) -> tuple[Cells, Int32[np.ndarray, " M"], Int32[np.ndarray, " M"]]:
    """Plans private copies of the cells of a range that a sequence shares, on the host.

    Args:
      cells: the state, in NumPy.
      seq_id: who owns the copies, and no longer the originals.
      p0: first position.
      p1: end of the range, exclusive; None is the end of the sequence.
      head: where the search for free cells starts.
      kept: empty cells that the copies may not take; None is none.

    Returns:
      The cells, then the cells to copy: src, ascending, to dst, which were empty. Copies keep
      position and pending shift.

    Raises:
      BadSequence: seq_id has no bit.
      BadRange: as in `seq_rm`.
      CacheFull: fewer cells are empty than are shared.
    """
    hit = _selected(cells, seq_id, p0, p1) & _shared(cells, seq_id)
    src = np.flatnonzero(hit).astype(np.int32)
    if len(src) == 0:
        return cells, src, src
    found = cells
    if kept is not None:
        found = dataclasses.replace(cells, pos=np.where(kept, np.int32(0), cells.pos))
    n, free = len(src), n_free(found)
    if n > free:
        raise CacheFull(
            f"splitting {n} shared cells of sequence {seq_id} needs {n} cells, {free} of "
            f"{n_ctx(cells)} are empty; remove positions or raise n_ctx"
        )
    dst = slots.plan_slots(found, head, n)
    pos, delta, seqs = cells.pos.copy(), cells.delta.copy(), cells.seqs.copy()
    bits = seq_words(cells, seq_id)
    pos[dst], delta[dst], seqs[dst] = pos[src], delta[src], bits
    seqs[src] &= ~bits
    return Cells(pos=pos, delta=delta, seqs=seqs), src, dst


def _selected(
    cells: Cells, seq_id: Scalar | None, p0: Scalar, p1: Scalar | None
) -> Bool[AnyArray, " C"]:
    """Which cells of seq_id, or of anybody, have a position in [p0, p1)."""
    hit = owned(cells, seq_id)
    if is_host(cells.pos):
        p0, p1 = checks.check_range(p0, p1)
        if p0 == 0:  # an owned cell has a position
            return hit if p1 is None else hit & (cells.pos < p1)
    hit = hit & (cells.pos >= p0)
    return hit if p1 is None else hit & (cells.pos < p1)


def _shared(cells: Cells, seq_id: Scalar) -> Bool[AnyArray, " C"]:
    """Which cells a sequence other than seq_id owns."""
    return any_bit(cells.seqs, ~seq_words(cells, seq_id))


def _unshared(cells: Cells, seq_id: Scalar, hit: Bool[AnyArray, " C"], op: str) -> Picks:
    """Cells of a sequence that are to move, on the host; raises SharedCells."""
    at = picks(hit)
    n = count(any_bit(picked(cells.seqs, at), ~seq_words(cells, seq_id)))
    if n:
        raise SharedCells(
            f"{op} on sequence {seq_id} would move {n} of {len(cells.pos[at])} cells that other "
            "sequences own as well; split them first with plan_split"
        )
    return at


def _joined(
    seqs: UInt32[AnyArray, "C W"], hit: Bool[AnyArray, " C"], bits: UInt32[AnyArray, "1 W"]
) -> UInt32[AnyArray, "C W"]:
    """The owners; the cells `hit` also get `bits`."""
    at = picks(hit)
    return with_picked(seqs, at, picked(seqs, at) | bits)


def _without(
    seqs: UInt32[AnyArray, "C W"], hit: Bool[AnyArray, " C"], bits: UInt32[AnyArray, "1 W"]
) -> UInt32[AnyArray, "C W"]:
    """The owners; the cells `hit` lose `bits`."""
    if is_host(hit) and not hit.any():
        return seqs
    at = picks(hit)
    return with_picked(seqs, at, picked(seqs, at) & ~bits)


def _emptied(cells: Cells, gone: Bool[AnyArray, " C"]) -> Cells:
    """The cells; those that are `gone` are empty."""
    at = picks(gone)
    pending = not is_host(gone) or picked(cells.delta, at).any()
    return Cells(
        pos=with_picked(cells.pos, at, -1),
        delta=with_picked(cells.delta, at, 0) if pending else cells.delta,
        seqs=with_picked(cells.seqs, at, 0),
    )


def _moved(cells: Cells, at: Picks, new: Int32[AnyArray, " _"]) -> Cells:
    """Some cells at their new positions; below 0 they become empty."""
    delta = picked(cells.delta, at) + (new - picked(cells.pos, at))
    moved = Cells(
        pos=with_picked(cells.pos, at, new),
        delta=with_picked(cells.delta, at, delta),
        seqs=cells.seqs,
    )
    if is_host(new) and new.min(initial=0) >= 0:
        return moved
    xp = namespace(new)
    return _emptied(moved, with_picked(xp.zeros_like(cells.pos, dtype=bool), at, new < 0))

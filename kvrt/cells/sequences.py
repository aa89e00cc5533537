"""Sequence operations: rm, cp, keep, add, div and what they ask, llama.cpp's `seq_` family.

Each returns new cells and copies no keys or values. The same function runs on the host, where it
checks its arguments first, and inside jit, where nothing can be raised: there a sequence without a
bit and a reversed range match no cell, and the caller keeps positions below 2^31. `apply` is the
same operations on values of `edits`.

Source: llama.cpp `llama_memory_seq_*`; DESIGN.md section 4 for what differs.
"""

import dataclasses
from collections.abc import Callable
from typing import assert_never

import numpy as np

from kvrt.arrays import AnyArray, Bool, Int32, UInt32, is_host, namespace
from kvrt.cells import checks, slots
from kvrt.cells.cells import Cells, any_bit, count, n_ctx, n_free, owned, scalar, seq_words
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
        return _reduced(cells, ~hit, _without(cells.seqs, hit, _all_bits(cells)))
    kept = ~hit | _shared(cells, seq_id)
    return _reduced(cells, kept, _without(cells.seqs, hit, seq_words(cells, seq_id)))


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
    others = ~seq_words(cells, seq_id)
    return _reduced(cells, owned(cells, seq_id), _without(cells.seqs, cells.pos >= 0, others))


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
        _refuse_shared(cells, seq_id, hit, "seq_add")
        if d > 0:
            checks.check_moved(int(np.max(np.where(hit, cells.pos, -1))), d)
    else:
        hit = hit & ~_shared(cells, seq_id)
    return _moved(cells, hit, cells.pos + d)


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
        _refuse_shared(cells, seq_id, hit, "seq_div")
    else:
        hit = hit & ~_shared(cells, seq_id)
    return _moved(cells, hit, cells.pos // d)


def seq_pos_min(cells: Cells, seq_id: Scalar) -> int | Int32[AnyArray, ""]:
    """Smallest position of a sequence, -1 if it is empty.

    Raises:
      BadSequence: seq_id has no bit.
    """
    xp = namespace(cells.pos)
    mine = owned(cells, seq_id)
    least = xp.min(xp.where(mine, cells.pos, MAX_POS))
    return scalar(xp.where(xp.any(mine), least, -1))


def seq_pos_max(cells: Cells, seq_id: Scalar) -> int | Int32[AnyArray, ""]:
    """Greatest position of a sequence, -1 if it is empty.

    Raises:
      BadSequence: seq_id has no bit.
    """
    xp = namespace(cells.pos)
    return scalar(xp.max(xp.where(owned(cells, seq_id), cells.pos, -1)))


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


def _all_bits(cells: Cells) -> UInt32[AnyArray, "1 W"]:
    """Mask words with the bits of all sequences."""
    xp = namespace(cells.pos)
    return xp.full((1, cells.seqs.shape[1]), 2**32 - 1, dtype=xp.uint32)


def _selected(
    cells: Cells, seq_id: Scalar | None, p0: Scalar, p1: Scalar | None
) -> Bool[AnyArray, " C"]:
    """Which cells of seq_id, or of anybody, have a position in [p0, p1)."""
    if is_host(cells.pos):
        p0, p1 = checks.check_range(p0, p1)
    hit = owned(cells, seq_id) & (cells.pos >= p0)
    return hit if p1 is None else hit & (cells.pos < p1)


def _shared(cells: Cells, seq_id: Scalar) -> Bool[AnyArray, " C"]:
    """Which cells a sequence other than seq_id owns."""
    return any_bit(cells.seqs, ~seq_words(cells, seq_id))


def _refuse_shared(cells: Cells, seq_id: Scalar, hit: Bool[AnyArray, " C"], op: str) -> None:
    n = count(hit & _shared(cells, seq_id))
    if n:
        raise SharedCells(
            f"{op} on sequence {seq_id} would move {n} of {count(hit)} cells that other sequences "
            "own as well; split them first with plan_split"
        )


def _joined(
    seqs: UInt32[AnyArray, "C W"], hit: Bool[AnyArray, " C"], bits: UInt32[AnyArray, "1 W"]
) -> UInt32[AnyArray, "C W"]:
    """The owners; the cells `hit` also get `bits`."""
    return _merged(seqs, hit, bits, lambda words, new: words | new)


def _without(
    seqs: UInt32[AnyArray, "C W"], hit: Bool[AnyArray, " C"], bits: UInt32[AnyArray, "1 W"]
) -> UInt32[AnyArray, "C W"]:
    """The owners; the cells `hit` lose `bits`."""
    return _merged(seqs, hit, bits, lambda words, old: words & ~old)


def _merged(
    seqs: UInt32[AnyArray, "C W"],
    hit: Bool[AnyArray, " C"],
    bits: UInt32[AnyArray, "1 W"],
    merge: Callable[[AnyArray, AnyArray], AnyArray],
) -> UInt32[AnyArray, "C W"]:
    if not is_host(seqs):
        return namespace(seqs).where(hit[:, None], merge(seqs, bits), seqs)
    # On the host only the words that change are written again, one at a time.
    out = seqs.copy()
    for i in np.flatnonzero(bits[0]):
        out[:, i] = np.where(hit, merge(seqs[:, i], bits[0, i]), seqs[:, i])
    return out


def _reduced(cells: Cells, kept: Bool[AnyArray, " C"], seqs: UInt32[AnyArray, "C W"]) -> Cells:
    """The cells with fewer owners; those that are not `kept` become empty."""
    xp = namespace(cells.pos)
    return Cells(pos=xp.where(kept, cells.pos, -1), delta=xp.where(kept, cells.delta, 0), seqs=seqs)


def _moved(cells: Cells, hit: Bool[AnyArray, " C"], new: Int32[AnyArray, " C"]) -> Cells:
    """The cells `hit` at their new positions; below 0 they become empty."""
    xp = namespace(cells.pos)
    delta = xp.where(hit, cells.delta + (new - cells.pos), cells.delta)
    pos = xp.where(hit, new, cells.pos)
    gone = hit & (new < 0)
    if is_host(gone) and not gone.any():
        return Cells(pos=pos, delta=delta, seqs=cells.seqs)
    seqs = _without(cells.seqs, gone, _all_bits(cells))
    return Cells(pos=xp.where(gone, -1, pos), delta=xp.where(gone, 0, delta), seqs=seqs)

"""The state of a cell cache: position and owners of each cell, never keys and values."""

import functools
import operator
from typing import Any

import jax
import numpy as np

from kvrt.arrays import AnyArray, Bool, Int32, UInt32, is_host, namespace, state
from kvrt.cells.checks import Scalar, check_seq_id

# Some cells, see `picks`.
Picks = Any


@state
class Cells:
    """Positions and owners of the cells of one group, in NumPy on the host or JAX on the device.

    Invariant: a cell is empty exactly when no bit of its owners is set; then pos is -1, delta 0.
    The position that a stored key is rotated to, pos - delta, is one the token once had.
    """

    pos: Int32[AnyArray, " C"]
    delta: Int32[AnyArray, " C"]
    seqs: UInt32[AnyArray, "C W"]


def create(n_ctx: int, n_seq_max: int) -> Cells:
    """n_ctx empty cells on the host, in NumPy."""
    return Cells(
        pos=np.full(n_ctx, -1, np.int32),
        delta=np.zeros(n_ctx, np.int32),
        seqs=np.zeros((n_ctx, mask_words(n_seq_max)), np.uint32),
    )


def mask_words(n_seq_max: int) -> int:
    """Mask words of a cell with a bit for each of so many sequences."""
    return -(-n_seq_max // 32)


def lengthened(cells: Cells, n: int) -> Cells:
    """The cells with empty ones behind them, n in all."""
    more = n - n_ctx(cells)
    if not more:
        return cells
    xp, empty = namespace(cells.pos), create(more, n_bits(cells))
    return Cells(
        pos=xp.concat([cells.pos, xp.asarray(empty.pos)]),
        delta=xp.concat([cells.delta, xp.asarray(empty.delta)]),
        seqs=xp.concat([cells.seqs, xp.asarray(empty.seqs)]),
    )


def n_ctx(cells: Cells) -> int:
    """How many cells there are."""
    return cells.pos.shape[0]


def n_bits(cells: Cells) -> int:
    """How many sequences a cell has bits for; n_seq_max rounded up to 32."""
    return cells.seqs.shape[1] * 32


def n_used(cells: Cells) -> int | Int32[AnyArray, ""]:
    """How many cells are used."""
    return count(cells.pos >= 0)


def n_free(cells: Cells) -> int | Int32[AnyArray, ""]:
    """How many cells are empty."""
    return count(cells.pos < 0)


def n_kv(cells: Cells) -> int | Int32[AnyArray, ""]:
    """Highest used cell + 1, 0 when all are empty: what lies beyond need not be read."""
    xp = namespace(cells.pos)
    if is_host(cells.pos):
        return (cells.pos >= 0).tobytes().rfind(1) + 1  # the C library's search from the end
    ends = xp.arange(1, n_ctx(cells) + 1, dtype=xp.int32)
    return scalar(xp.max(xp.where(cells.pos >= 0, ends, 0)))


def owner_bits(cells: Cells, seq_id: Int32[AnyArray, "*S"] | Scalar) -> UInt32[AnyArray, "*S W"]:
    """Mask words in which only the bit of seq_id is set; none is for -1, a padding token."""
    xp = namespace(cells.pos)
    word = xp.arange(cells.seqs.shape[1], dtype=xp.int32)
    seq = xp.asarray(seq_id, dtype=xp.int32)[..., None]
    word = xp.reshape(word, (1,) * (seq.ndim - 1) + word.shape)
    bit = xp.left_shift(xp.asarray(1, dtype=xp.uint32), xp.astype(seq % 32, xp.uint32))
    return xp.where(word == seq // 32, bit, xp.asarray(0, dtype=xp.uint32))


def owned(cells: Cells, seq_id: Scalar | None) -> Bool[AnyArray, " C"]:
    """Which cells seq_id owns; with None, which cells anybody owns.

    Inside jit a sequence that has no bit owns nothing.

    Raises:
      BadSequence: on the host, seq_id has no bit.
    """
    if seq_id is None:
        return cells.pos >= 0
    if is_host(cells.pos):
        word, bit = divmod(check_seq_id(seq_id, n_bits(cells)), 32)
        return (cells.seqs[:, word] & np.uint32(1 << bit)).astype(bool)
    return any_bit(cells.seqs, seq_words(cells, seq_id))


def seq_words(cells: Cells, seq_id: Scalar) -> UInt32[AnyArray, "1 W"]:
    """The mask words of one sequence, with an axis to combine them with those of all cells.

    Raises:
      BadSequence: on the host, seq_id has no bit.
    """
    if not is_host(cells.pos):
        return owner_bits(cells, seq_id)[None]
    word, bit = divmod(check_seq_id(seq_id, n_bits(cells)), 32)
    words = np.zeros((1, cells.seqs.shape[1]), np.uint32)
    words[0, word] = 1 << bit
    return words


def any_bit(seqs: UInt32[AnyArray, "C W"], bits: UInt32[AnyArray, "1 W"]) -> Bool[AnyArray, " C"]:
    """Which cells have one of the bits."""
    if not is_host(seqs):
        return namespace(seqs).any((seqs & bits) != 0, axis=1)
    # NumPy reduces a short last axis cell by cell, ten times slower than word by word.
    if seqs.shape[1] % 2 == 0:
        seqs, bits = seqs.view(np.uint64), bits.view(np.uint64)
    columns = [seqs[:, i] & bits[0, i] for i in range(seqs.shape[1])]
    return functools.reduce(operator.or_, columns).astype(bool)


def picks(which: Bool[AnyArray, " C"]) -> Picks:
    """Some cells in the form that is quickest to read and write.

    On the host a slice where they follow each other, as those of a sequence mostly do, else their
    numbers, ascending; inside jit the mask itself.
    """
    if not is_host(which):
        return which
    n = np.count_nonzero(which)
    start = int(which.argmax()) if n else 0
    row = slice(start, start + n)
    return row if which[row].all() else np.flatnonzero(which)


def picked(x: AnyArray, at: Picks) -> AnyArray:
    """What some cells have in an array; inside jit, where sizes are fixed, all of it."""
    return x[at] if is_host(x) else x


def with_picked(x: AnyArray, at: Picks, new: AnyArray | int) -> AnyArray:
    """An array with other values for some cells, which are given as `picked` gives them."""
    if is_host(x):
        out = x.copy()
        out[at] = new
        return out
    hit = at if x.ndim == 1 else at[:, None]
    return namespace(x).where(hit, new, x)


def greatest_pos(
    pos: Int32[AnyArray, " C"], which: Bool[AnyArray, " C"]
) -> int | Int32[AnyArray, ""]:
    """The greatest position of some cells, -1 if there are none."""
    if is_host(pos):
        return int(pos[picks(which)].max(initial=-1))
    xp = namespace(pos)
    return scalar(xp.max(xp.where(which, pos, -1)))


def count(which: Bool[AnyArray, " C"]) -> int | Int32[AnyArray, ""]:
    """How many are true."""
    return scalar(namespace(which).count_nonzero(which))


def scalar(x: AnyArray | np.generic | int) -> int | Int32[AnyArray, ""]:
    """A Python int on the host, an int32 scalar inside jit."""
    return x.astype(namespace(x).int32) if isinstance(x, jax.Array) else int(x)

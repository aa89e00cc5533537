"""Refusals of arguments that the host can see; inside jit nobody can, and nothing here runs.

Each check returns its argument as a Python int, so that later arithmetic never wraps.
"""

import operator

import numpy as np

from kvrt.arrays import AnyArray, Int32
from kvrt.config import MAX_POS
from kvrt.errors import BadRange, BadSequence

# What operations take as numbers: Python ints on the host, traced int32 scalars inside jit.
Scalar = int | np.integer | Int32[AnyArray, ""]


def check_seq_id(seq_id: Scalar, n_seq_max: int) -> int:
    """The sequence number as an int.

    Args:
      seq_id: any integer.
      n_seq_max: sequences there may be: the configured number, or the bits of a cell.

    Raises:
      BadSequence: it is outside [0, n_seq_max).
    """
    value = operator.index(seq_id)
    if not 0 <= value < n_seq_max:
        raise BadSequence(
            f"sequence {value} does not exist, ids are 0 to {n_seq_max - 1}; raise n_seq_max"
        )
    return value


def check_range(p0: Scalar, p1: Scalar | None) -> tuple[int, int | None]:
    """The half-open range [p0, p1) as ints; p1=None is the end.

    Raises:
      BadRange: it is reversed, negative or beyond 2^31 - 1.
    """
    first = operator.index(p0)
    last = None if p1 is None else operator.index(p1)
    top = MAX_POS if last is None else last
    if first < 0 or top < 0:
        raise BadRange(f"range [{first}, {top}) is negative; start at 0, and end with p1=None")
    if first > MAX_POS or top > MAX_POS:
        raise BadRange(f"range [{first}, {top}) exceeds the last position {MAX_POS}; lower it")
    if top < first:
        raise BadRange(f"range [{first}, {top}) is reversed; p0 must not exceed p1")
    return first, last


def check_distance(d: Scalar) -> int:
    """The distance of a move as an int.

    Raises:
      BadRange: no position could move that far.
    """
    value = operator.index(d)
    if abs(value) > MAX_POS:
        raise BadRange(f"a move by {value} tokens leaves [0, {MAX_POS}] from anywhere; lower d")
    return value


def check_moved(pos_max: int, d: int) -> None:
    """Refuses a move of the greatest position `pos_max` beyond the last one.

    Raises:
      BadRange: pos_max + d exceeds 2^31 - 1.
    """
    if pos_max + d > MAX_POS:
        raise BadRange(
            f"position {pos_max} would move by {d} to {pos_max + d}, the limit is {MAX_POS}; "
            f"move by {MAX_POS - pos_max} at most"
        )


def check_divisor(d: Scalar) -> int:
    """The divisor of positions as an int.

    Raises:
      BadRange: it is outside [1, 2^31 - 1].
    """
    value = operator.index(d)
    if not 1 <= value <= MAX_POS:
        raise BadRange(f"positions cannot be divided by {value}; use 1 to {MAX_POS}")
    return value


def check_placed(pos: np.ndarray, seq_ids: np.ndarray, n_seq_max: int) -> None:
    """Refuses tokens that have no position or no sequence.

    Raises:
      BadRange: a position is negative.
      BadSequence: an id is outside [0, n_seq_max).
    """
    if len(pos) and pos.min() < 0:
        raise BadRange(f"a token has the negative position {pos.min()}; positions start at 0")
    if len(seq_ids) and (seq_ids.min() < 0 or seq_ids.max() >= n_seq_max):
        bad = seq_ids.min() if seq_ids.min() < 0 else seq_ids.max()
        check_seq_id(bad, n_seq_max)

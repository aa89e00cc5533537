"""Where two token lists agree: common ends, and long common runs in one order.

The comparison costs about n log n: runs are found by n-grams that occur once on either side, in
the longest chain that crosses nothing, then once more between the runs found so far.

Source: B. Cohen, patience diff; J. W. Hunt and T. G. Szymanski, 1977, for the chain.
"""

import bisect
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32  # not from arrays: a list of sessions needs no JAX

_ANCHOR = 32  # tokens of an n-gram at most
_ROUNDS = 16  # how often the gaps between runs are searched again
_BASE = np.uint64(0x9E3779B97F4A7C15)


class Run(NamedTuple):
    """Tokens [old, old + n) of one list, equal to [new, new + n) of the other."""

    old: int
    new: int
    n: int


class Box(NamedTuple):
    """A part of both lists, [a0, a1) and [b0, b1)."""

    a0: int
    a1: int
    b0: int
    b1: int


def common_prefix(a: Int32[np.ndarray, " A"], b: Int32[np.ndarray, " B"]) -> int:
    """How many tokens the lists begin with alike; costs as much as the answer is long."""
    n, start, size = min(len(a), len(b)), 0, 64
    while start < n:
        stop = min(start + size, n)
        if (unequal := np.flatnonzero(a[start:stop] != b[start:stop])).size:
            return start + int(unequal[0])
        start, size = stop, 2 * size
    return n


def common_suffix(a: Int32[np.ndarray, " A"], b: Int32[np.ndarray, " B"]) -> int:
    """How many tokens the lists end with alike."""
    return common_prefix(a[::-1], b[::-1])


def runs(a: Int32[np.ndarray, " A"], b: Int32[np.ndarray, " B"], n_least: int) -> tuple[Run, ...]:
    """Common runs of at least n_least tokens, ascending in both lists.

    They are long, not always the longest there could be: text that repeats itself is matched at
    the ends of what differs only.
    """
    found: list[Run] = []
    boxes = [Box(0, len(a), 0, len(b))]
    for _ in range(_ROUNDS):
        inner: list[Box] = []
        for box in boxes:
            here = _inside(a, b, box, n_least)
            found += here
            inner += gaps(here, box) if here else []
        boxes = inner
    return tuple(sorted(found))


def gaps(found: tuple[Run, ...] | list[Run], box: Box) -> list[Box]:
    """What lies before, between and after ascending runs, one box more than there are runs."""
    out, a0, b0 = [], box.a0, box.b0
    for run in found:
        out.append(Box(a0, run.old, b0, run.new))
        a0, b0 = run.old + run.n, run.new + run.n
    return [*out, Box(a0, box.a1, b0, box.b1)]


def _inside(a: np.ndarray, b: np.ndarray, box: Box, n_least: int) -> list[Run]:
    """Runs of a box: at its ends, else where anchors are."""
    x, y = a[box.a0 : box.a1], b[box.b0 : box.b1]
    if min(len(x), len(y)) < n_least:
        return []
    here = _at_ends(x, y, n_least) or _anchored(x, y, n_least)
    return [Run(box.a0 + r.old, box.b0 + r.new, r.n) for r in here]


def _at_ends(x: np.ndarray, y: np.ndarray, n_least: int) -> list[Run]:
    out = []
    first = common_prefix(x, y)
    if first >= n_least:
        out.append(Run(0, 0, first))
    else:
        first = 0
    last = common_suffix(x[first:], y[first:])
    if last >= n_least:
        out.append(Run(len(x) - last, len(y) - last, last))
    return out


def _anchored(x: np.ndarray, y: np.ndarray, n_least: int) -> list[Run]:
    """Runs around n-grams that both lists have once, grown both ways."""
    size = min(n_least, _ANCHOR)
    out, x0, y0 = [], 0, 0
    for i, j in _chain(*_anchors(x, y, size)):
        if i < x0 or j < y0:
            continue
        forth = common_prefix(x[i:], y[j:])
        if forth < size:  # equal hashes of unequal tokens
            continue
        back = common_suffix(x[x0:i], y[y0:j])
        if back + forth >= n_least:
            out.append(Run(i - back, j - back, back + forth))
        x0, y0 = i + forth, j + forth
    return out


def _anchors(x: np.ndarray, y: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where n-grams that occur once in x and once in y stand, in the order of y."""
    in_x, at_x = _once(_hashes(x, size))
    in_y, at_y = _once(_hashes(y, size))
    _, p, q = np.intersect1d(in_x, in_y, assume_unique=True, return_indices=True)
    order = np.argsort(at_y[q])
    return at_x[p][order], at_y[q][order]


def _once(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, first, n = np.unique(hashes, return_index=True, return_counts=True)
    return values[n == 1], first[n == 1]


def _hashes(x: np.ndarray, size: int) -> np.ndarray:
    """A polynomial of every n-gram, modulo 2^64."""
    n = len(x) - size + 1
    out = np.zeros(n, np.uint64)
    for k in range(size):
        out = out * _BASE + x[k : k + n].astype(np.uint64) + np.uint64(1)
    return out


def _chain(at_x: np.ndarray, at_y: np.ndarray) -> list[tuple[int, int]]:
    """The longest part of the anchors that ascends in x as it does in y."""
    tails: list[int] = []  # least end of an ascending chain of each length
    last: list[int] = []  # which anchor that is
    before = []  # the anchor before each in its chain, -1 for none
    for k, i in enumerate(at_x.tolist()):
        n = bisect.bisect_left(tails, i)
        before.append(last[n - 1] if n else -1)
        if n == len(tails):
            tails.append(i)
            last.append(k)
        else:
            tails[n], last[n] = i, k
    out, k = [], last[-1] if last else -1
    while k >= 0:
        out.append((int(at_x[k]), int(at_y[k])))
        k = before[k]
    return out[::-1]

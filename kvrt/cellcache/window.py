"""Which positions a windowed group may drop, and which it has lost, as intervals.

A rolling group uses a cell again once no later token can see it. The positions that were lost that
way are ascending disjoint intervals [a, b), a few numbers however long the sequence is, and every
edit of a sequence changes them along with its cells.
"""

from collections.abc import Iterable

from kvrt.config import MaskSpec

Intervals = tuple[tuple[int, int], ...]


def horizon(mask: MaskSpec, pos: int) -> int:
    """The least position that a token at `pos`, or any after it, sees."""
    if mask.kind == "window":
        return max(pos - mask.size + 1, 0)
    if mask.kind == "chunked":
        return pos // mask.size * mask.size
    return 0


def can_resume(mask: MaskSpec, lost: Intervals, pos: int) -> bool:
    """Whether a token at `pos` sees nothing that was lost."""
    first = horizon(mask, pos)
    return not any(a < pos and (b > first or a < mask.n_sink) for a, b in lost)


def resume_gaps(mask: MaskSpec, lost: Intervals) -> Intervals:
    """Positions [a, b) whose token would see something that was lost; those of `can_resume` not."""
    if mask.kind == "window":
        return union((a + 1, b + mask.size - 1) for a, b in lost)
    return union((a + 1, -(-b // mask.size) * mask.size) for a, b in lost)


def union(*parts: Iterable[tuple[int, int]]) -> Intervals:
    """The union; what lies below 0 is left out."""
    out: list[tuple[int, int]] = []
    for a, b in sorted((max(a, 0), b) for part in parts for a, b in part):
        if a >= b:
            continue
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return tuple(out)


def within(lost: Intervals, p0: int, p1: int | None) -> Intervals:
    """The part in [p0, p1)."""
    return union((max(a, p0), b if p1 is None else min(b, p1)) for a, b in lost)


def without(lost: Intervals, p0: int, p1: int | None) -> Intervals:
    """The part outside [p0, p1)."""
    return union(within(lost, 0, p0), () if p1 is None else within(lost, p1, None))


def added(lost: Intervals, p0: int, p1: int | None, d: int) -> Intervals:
    """The intervals after positions [p0, p1) moved by d."""
    moved = ((a + d, b + d) for a, b in within(lost, p0, p1))
    return union(without(lost, p0, p1), moved)


def divided(lost: Intervals, p0: int, p1: int | None, d: int) -> Intervals:
    """The intervals after positions [p0, p1) were divided by d, rounding down."""
    moved = ((a // d, (b - 1) // d + 1) for a, b in within(lost, p0, p1))
    return union(without(lost, p0, p1), moved)

"""Defragmentation: which cells move so that the used ones come first; a plan on the host.

Writes need no neighbours, so holes cost only what is read beyond them: a smaller n_kv and, when
ordered by sequence, fewer blocks a sequence.
"""

import dataclasses

import numpy as np

from kvrt.arrays import AnyArray, Int32
from kvrt.cells import Cells, n_kv, n_used
from kvrt.errors import BadConfig

# Cells that do not count as empty, because attention reads whole blocks, as in llama.cpp.
_PADDING = 256
# Below this n_kv llama.cpp calls no cache fragmented: there is nothing to gain.
N_KV_MIN = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class DefragPlan:
    """Rounds of moves; a round is int32[M, 2], from the cell in column 0 to the one in column 1.

    The rounds follow each other. In a round no cell is written twice, and a cell is both read and
    written only by a swap, which is the moves (a, b) and (b, a), at 2 i and 2 i + 1. So a round
    may run in chunks of any even size, in any order, each reading all its cells before it writes.
    """

    rounds: tuple[Int32[np.ndarray, "_ 2"], ...]

    @property
    def n_moves(self) -> int:
        """Cells written."""
        return sum(len(moves) for moves in self.rounds)


def fragmentation(cells: Cells) -> float:
    """Part of the first n_kv cells that is empty, 0 below 2048 cells.

    Args:
      cells: on the host.

    Source: llama.cpp `kv_self_update`, early 2025.
    """
    n = int(n_kv(cells))
    return max(0.0, 1 - (int(n_used(cells)) + _PADDING) / n) if n >= N_KV_MIN else 0.0


def should_defrag(cells: Cells, threshold: float | None) -> bool:
    """True when `fragmentation` exceeds the threshold; None is never.

    Raises:
      BadConfig: the threshold is outside [0, 1].
    """
    if threshold is None:
        return False
    if not 0 <= threshold <= 1:
        raise BadConfig(f"defrag threshold is {threshold}; use 0 to 1, or None to turn it off")
    return fragmentation(cells) > threshold


def plan_defrag(cells: Cells, by_sequence: bool = False) -> tuple[Cells, DefragPlan]:
    """Plans to bring all used cells to the front, without a limit on moves.

    Args:
      cells: on the host. Pending shifts move with their cells.
      by_sequence: also orders the cells by lowest owner, then position, which takes up to two
        rounds; otherwise cells from the end fill the holes, each at most once, in one round.

    Returns:
      The cells after the moves, used ones first, and the moves. Keys and values of cells that
      become empty keep their bytes.

    Source: llama.cpp `llama_kv_cache_defrag`, whose order the plain plan keeps.
    """
    used = np.flatnonzero(cells.pos >= 0).astype(np.int32)
    if by_sequence:
        order = used[np.lexsort((cells.pos[used], _lowest_owner(cells.seqs[used])))]
        rounds = _two_rounds(order)
    else:
        order, moves = _fill_holes(cells, used)
        rounds = (moves,)
    plan = DefragPlan(rounds=tuple(moves for moves in rounds if len(moves)))
    return _gathered(cells, order), plan


def _gathered(cells: Cells, order: np.ndarray) -> Cells:
    """Cell order[i] at i, and nothing behind."""
    n = len(order)
    pos, delta = np.full_like(cells.pos, -1), np.zeros_like(cells.delta)
    seqs = np.zeros_like(cells.seqs)
    pos[:n], delta[:n], seqs[:n] = cells.pos[order], cells.delta[order], cells.seqs[order]
    return Cells(pos=pos, delta=delta, seqs=seqs)


def _fill_holes(cells: Cells, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which cell ends at each index, and the moves.

    Each hole, a run of empty cells before n_used, takes the last cells that have not moved yet, in
    their order:

        a . . b . c d e        n_used 5; the first hole takes d e, the second c
        a d e b c . . .
    """
    n = len(used)
    holes = np.flatnonzero(cells.pos[:n] < 0).astype(np.int32)
    m = len(holes)
    order = np.arange(n, dtype=np.int32)
    if m == 0:
        return order, np.zeros((0, 2), np.int32)
    i = np.arange(m)
    opens = np.concatenate([[True], np.diff(holes) > 1])
    first = i[opens]
    size = np.diff(np.append(first, m))
    first, end = np.repeat(first, size), np.repeat(first + size, size)
    # used[-m:] are the cells at n_used and beyond, as many as the holes before it.
    src = used[n - m :][m - end + i - first]
    order[holes] = src
    return order, np.stack([src, holes], axis=1)


def _lowest_owner(seqs: AnyArray) -> np.ndarray:
    """The lowest owner of each cell, none of which is empty."""
    seqs = np.asarray(seqs)
    word = np.argmax(seqs != 0, axis=1)
    bits = seqs[np.arange(len(seqs)), word]
    lowest = bits & (~bits + np.uint32(1))
    return word * 32 + np.bitwise_count(lowest - np.uint32(1))


def _two_rounds(order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moves of cell order[k] to cell k as two rounds of swaps.

    Rotating a ring of cells, i to i + 1, is the mirror i to -i and then the mirror i to 1 - i.
    A chain that starts in a cell to be emptied and ends in a hole is closed to a ring; where a
    swap has an empty side, one move is enough.
    """
    swaps: tuple[list, list] = ([], [])
    singles: tuple[list, list] = ([], [])
    filled = set(order.tolist())
    for ring in _rings(order):
        used = [c in filled for c in ring]
        for mirror in (0, 1):
            for i in range(len(ring)):
                j = (mirror - i) % len(ring)
                if i < j and used[i] and used[j]:
                    swaps[mirror].extend([(ring[i], ring[j]), (ring[j], ring[i])])
                elif i != j and used[i] and not used[j]:
                    singles[mirror].append((ring[i], ring[j]))
            used = [used[(mirror - i) % len(ring)] for i in range(len(ring))]
    first, second = (
        np.array(swap + single, np.int32).reshape(-1, 2)
        for swap, single in zip(swaps, singles, strict=True)
    )
    return first, second


def _rings(order: np.ndarray) -> list[list[int]]:
    """Cells that move, as rings in which each moves to the next."""
    to = {int(c): k for k, c in enumerate(order) if c != k}
    targets = set(to.values())
    # Chains first: a cell that nothing moves to starts one, and its last cell is a hole.
    starts = [c for c in to if c not in targets]
    rings = []
    for start in [*starts, *to]:
        ring, c = [], start
        while c in to:
            ring.append(c)
            c = to.pop(c)
        if ring:
            rings.append(ring if c == start else [*ring, c])
    return rings

"""Where new tokens of sequences that grow together go: each sequence has a home block.

In ring order (`slots.py`) such sequences take turns, and each comes to lie in all blocks, which its
next token reads. Here a sequence's tokens go to its home: to the cells behind its newest token,
then to the other empty ones of that block. When the block is full, the sequence moves: to a block
that it has cells in and nobody lives in; without one to the block with most empty cells for each
who would live there. So a sequence begins a block only when those that it alone lives in are full,
and every empty cell is found. Sequences of 6, 3 and 2 tokens that grow together, blocks of 4 cells:

    ring order   a b c a | b c a b | a a a .        homes   a a a a | b b b . | c c . . | a a . .

As `head` is, a home is a hint: which slots are found follows from it, what is computed does not.
"""

from collections.abc import Callable

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.cells.cells import Cells
from kvrt.cells.slots import plan_slots

# By sequence number the cell behind its newest token, -1 for a sequence without a home.
Ends = Int32[np.ndarray, " S"]
BlocksOf = Callable[[int], Int32[np.ndarray, " N"]]


def no_homes(n_seq_max: int) -> Ends:
    """No sequence has a home."""
    return np.full(n_seq_max, -1, np.int32)


def plan_home_slots(
    cells: Cells,
    ends: Ends,
    seq_ids: Int32[np.ndarray, " n"],
    block_size: int,
    blocks_of: BlocksOf,
) -> Int32[np.ndarray, " n"]:
    """Finds an empty cell for each of some tokens, on the host.

    Args:
      cells: the state, in NumPy.
      ends: where each sequence lives; `ends[seq_ids] = slots + 1` follows when they are placed.
      seq_ids: sequence of each token, those of one sequence together and in order.
      block_size: cells of a block; the last block may have fewer.
      blocks_of: blocks that a sequence has cells in.

    Raises:
      CacheFull: there are too few.
    """
    slots, fits = _behind(cells, ends, seq_ids, block_size)
    if fits.all():
        return slots
    if np.count_nonzero(cells.pos < 0) < len(seq_ids):
        return plan_slots(cells, 0, len(seq_ids))  # says what is lacking
    search = _Search(cells, ends, block_size, blocks_of)
    search.take(slots[fits])
    starts = np.flatnonzero(np.diff(seq_ids, prepend=-1))
    counts = np.diff(starts, append=len(seq_ids))
    for start, n in zip(starts.tolist(), counts.tolist(), strict=True):
        if not fits[start]:
            slots[start : start + n] = search.find(int(seq_ids[start]), n)
    return slots


def n_blocks_wanted(
    cells: Cells, ends: Ends, seq_ids: Int32[np.ndarray, " n"], block_size: int
) -> int:
    """Blocks that tokens would begin, if there were enough without a token, beyond those there are.

    Args:
      cells: the state, in NumPy.
      ends: where each sequence lives.
      seq_ids: as for `plan_home_slots`.
      block_size: cells of a block.
    """
    _, fits = _behind(cells, ends, seq_ids, block_size)
    if fits.all():
        return 0
    empty = _by_block(cells, block_size)
    n_empty = np.count_nonzero(empty, axis=1)
    seqs, n_tokens = np.unique(seq_ids[~fits], return_counts=True)
    lives = ends[seqs] >= 0
    n_tokens[lives] -= n_empty[(ends[seqs][lives] - 1) // block_size]
    n_wanted = int((-(-n_tokens // block_size)).clip(0).sum())
    return max(n_wanted - int(np.count_nonzero(n_empty == block_size)), 0)


def _behind(
    cells: Cells, ends: Ends, seq_ids: Int32[np.ndarray, " n"], block_size: int
) -> tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """The cells behind each sequence's newest token, and whose tokens all fit there."""
    last, index = len(cells.pos) - 1, np.arange(len(seq_ids), dtype=np.int32)
    new, at = np.diff(seq_ids, prepend=-1) != 0, ends[seq_ids]
    slots = at if new.all() else at + index - np.maximum.accumulate(np.where(new, index, 0))
    fits = (at > 0) & (slots // block_size == (at - 1) // block_size) & (slots <= last)
    fits = _of_all(fits & (cells.pos[np.minimum(slots, last)] < 0), new)
    # Where two live in one block, the second one that wants a cell looks for another.
    wanted = np.where(fits, slots, -1 - index)
    order = wanted.argsort(kind="stable")
    again = order[1:][wanted[order[1:]] == wanted[order[:-1]]]
    if len(again):
        fits[again] = False
        fits = _of_all(fits, new)
    return slots, fits


def _of_all(fits: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Of each token whether all of its sequence fit; `new` marks the first one of each."""
    if new.all():
        return fits
    first = np.flatnonzero(new)
    return np.repeat(np.logical_and.reduceat(fits, first), np.diff(first, append=len(new)))


class _Search:
    """Empty cells by block, and who lives where, while the tokens of a step find their places."""

    def __init__(self, cells: Cells, ends: Ends, block_size: int, blocks_of: BlocksOf):
        """As they are before the step."""
        self._size, self._ends, self._blocks_of = block_size, ends.copy(), blocks_of
        self._empty = _by_block(cells, block_size)
        self._n_empty = np.count_nonzero(self._empty, axis=1)

    def take(self, slots: Int32[np.ndarray, " n"]) -> None:
        """Some tokens have found their cells."""
        self._empty[slots // self._size, slots % self._size] = False
        np.subtract.at(self._n_empty, slots // self._size, 1)

    def find(self, seq_id: int, n: int) -> Int32[np.ndarray, " n"]:
        """Cells for n tokens of a sequence, of which there are enough."""
        found: list[int] = []
        while len(found) < n:
            block, start = self._home(seq_id)
            here = np.flatnonzero(self._empty[block]).astype(np.int32)
            here = np.concatenate([here[here >= start], here[here < start]])
            here = here[: n - len(found)] + np.int32(block * self._size)
            self.take(here)
            self._ends[seq_id] = here[-1] + 1
            found += here.tolist()
        return np.array(found, np.int32)

    def _home(self, seq_id: int) -> tuple[int, int]:
        """The block that a sequence lives in, if that has room, or moves to; and from where on."""
        end = int(self._ends[seq_id])
        if end > 0 and self._n_empty[(end - 1) // self._size]:
            return (end - 1) // self._size, (end - 1) % self._size + 1
        others = self._ends[self._ends > 0]
        n_living = np.bincount((others - 1) // self._size, minlength=len(self._n_empty))
        mine = self._blocks_of(seq_id)
        mine = mine[(n_living[mine] == 0) & (self._n_empty[mine] > 0)]
        if len(mine):
            return int(mine[self._n_empty[mine].argmax()]), 0
        block = int((self._n_empty / (n_living + 1)).argmax())
        if not n_living[block]:
            return block, 0
        # In the middle of what is empty, so that those who live there are long in finding each
        # other's tokens before them.
        return block, int(np.flatnonzero(self._empty[block])[self._n_empty[block] // 2])


def _by_block(cells: Cells, block_size: int) -> Bool[np.ndarray, "N B"]:
    """Which cells are empty; those that the last block lacks are not."""
    empty = np.zeros((-(-len(cells.pos) // block_size), block_size), bool)
    empty.reshape(-1)[: len(cells.pos)] = cells.pos < 0
    return empty

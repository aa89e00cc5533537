"""Where new tokens go: the ring search of a cell cache, and its hint `head`.

A slot equal to the number of cells is padding and is dropped wherever slots are used as indices.

Source: llama.cpp `llama_kv_cache::find_slot`, the newest rule.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from kvrt.arrays import AnyArray, Bool, Int32, is_host, namespace, put, state
from kvrt.cells import checks
from kvrt.cells.cells import Cells, n_bits, n_ctx, n_used, owner_bits
from kvrt.cells.checks import Scalar, check_range, check_seq_id
from kvrt.errors import CacheFull


@state
class SharedBlocks:
    """Shared prefixes of block lists, taken out of them to be read once: K runs of blocks.

    Run i is the first n_blocks[i] entries of tables[i], for the sequences members[i], padded with
    S. A sequence may be a member of several runs, whose blocks all differ.
    """

    tables: Int32[AnyArray, "K M"]
    n_blocks: Int32[AnyArray, " K"]
    members: Int32[AnyArray, "K S"]

    @property
    def n_runs(self) -> Int32[AnyArray, ""]:
        """Runs up to the last one that has a block."""
        xp = namespace(self.n_blocks)
        nth = xp.arange(1, self.n_blocks.shape[0] + 1, dtype=xp.int32)
        return xp.asarray(xp.max(xp.where(self.n_blocks > 0, nth, 0)))

    @property
    def widths(self) -> tuple[int, ...]:
        """Members that a run is read for at a time: as few of these as hold its own."""
        n_seqs = self.members.shape[1]
        return (*(w for w in (4, 16, 64, 256) if w < n_seqs), n_seqs)

    def width(self, i: Int32[AnyArray, ""]) -> Int32[AnyArray, ""]:
        """Which of `widths` run i has."""
        xp, n_seqs = namespace(self.members), self.members.shape[1]
        n = xp.count_nonzero(self.members[i] < n_seqs)
        return xp.asarray(xp.count_nonzero(n > xp.asarray(self.widths[:-1], dtype=n.dtype)))


@state
class SeqBlocks:
    """A block list for each of S sequences: the first n_blocks[i] entries of tables[i].

    Prefixes that several share may be apart, in `shared`.
    """

    tables: Int32[AnyArray, "S M"]
    n_blocks: Int32[AnyArray, " S"]
    shared: SharedBlocks | None = None


@state
class Places:
    """Slots of a step's tokens in one group, and the first n_blocks of `blocks` that they read.

    Padding tokens have a slot beyond the last one. Where there are `seq_blocks`, the first S tokens
    of the step are of one sequence each and read the blocks of theirs; the others read `blocks`.
    `fresh` are blocks whose cells are empty from this step on, whoever had them before.
    """

    slots: Int32[AnyArray, " T"]
    blocks: Int32[AnyArray, " N"]
    n_blocks: Int32[AnyArray, ""]
    seq_blocks: SeqBlocks | None = None
    fresh: Int32[AnyArray, " F"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTokens:
    """The n tokens of one step, and where they stand in its arrays.

    First come tokens of as many sequences, which read block lists of their own, padded to n_lists;
    then all others, padded to `size` in all.

    Attributes:
      tokens: ids. `[n]`
      pos: positions. `[n]`
      seq_ids: sequences. `[n]`
      size: tokens of the arrays, padding included (T).
      n_single: tokens with a block list of their own.
      n_lists: those lists, padding included.
      cached_early: whether tokens are cached before later ones of the step read them.
    """

    tokens: Int32[np.ndarray, " n"]
    pos: Int32[np.ndarray, " n"]
    seq_ids: Int32[np.ndarray, " n"]
    size: int
    n_single: int = 0
    n_lists: int = 0
    cached_early: bool = False

    @functools.cached_property
    def first(self) -> Mapping[int, int]:
        """By sequence, the position of its first token; tokens of one follow each other."""
        at = np.flatnonzero(np.diff(self.seq_ids, prepend=-1))
        return dict(zip(self.seq_ids[at].tolist(), self.pos[at].tolist(), strict=True))

    def read_blocks(
        self, blocks: np.ndarray, slots: Int32[np.ndarray, " n"], block_size: int
    ) -> np.ndarray:
        """Blocks cached before the step, and those of its own slots that are cached early."""
        if not self.cached_early:
            return blocks
        own = slots[self.n_single :] // block_size
        return np.array(list(dict.fromkeys([*blocks.tolist(), *own.tolist()])), np.int32)

    def spread(self, values: Int32[np.ndarray, " n"], fill: int) -> Int32[np.ndarray, " T"]:
        """Values of the tokens at their places in the step's arrays."""
        out, n, start = np.full(self.size, fill, np.int32), self.n_single, self.n_lists
        out[:n], out[start : start + len(values) - n] = values[:n], values[n:]
        return out


def one_sequence(
    tokens: Sequence[int] | np.ndarray, seq_id: int, first: int, size: int
) -> StepTokens:
    """A step of one sequence's tokens, at `first` and the positions behind it."""
    n = len(tokens)
    pos, seq_ids = np.arange(first, first + n, dtype=np.int32), np.full(n, seq_id, np.int32)
    return StepTokens(tokens=np.asarray(tokens, np.int32), pos=pos, seq_ids=seq_ids, size=size)


Step = TypeVar("Step", bound=StepTokens)


def only_tokens(step: Step, stays: Bool[np.ndarray, " n"], **new: Any) -> Step:
    """A step of the tokens that stay alone, with other fields of its own."""
    of = {x: getattr(step, x)[stays] for x in ("tokens", "pos", "seq_ids")}
    return dataclasses.replace(step, **(of | new))


def pad(values: Sequence[int] | np.ndarray, size: int, fill: int) -> np.ndarray:
    """int32[size] that begins with `values`."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def find_slots(
    cells: Cells, head: Scalar, n: int
) -> tuple[Int32[AnyArray, " n"], Bool[AnyArray, ""]]:
    """Finds n empty cells in ring order from `head`; runs inside jit.

    The search starts at cell 0 instead when head is more than 2 n beyond the number of used cells:
    a cache that has become mostly empty is filled from the front again.

    Args:
      cells: the state.
      head: where to start, 0 to n_ctx.
      n: cells wanted; static.

    Returns:
      The cells and True, or n times n_ctx and False.
    """
    xp = namespace(cells.pos)
    c = n_ctx(cells)
    if n > c:
        return xp.full(n, c, dtype=xp.int32), xp.asarray(False)
    if n == 0:
        return xp.zeros(0, dtype=xp.int32), xp.asarray(True)
    start = xp.where(head - n_used(cells) > 2 * n, 0, head)
    free = xp.astype(cells.pos < 0, xp.int32)
    before = xp.cumulative_sum(free, dtype=xp.int32, include_initial=True)
    step = xp.arange(n, dtype=xp.int32)
    # before = 0 0 1 2 2 ...: the i-th empty cell is the one after which i + 1 are counted.
    total = before[c]
    rank = (before[start] + step) % xp.maximum(total, 1) + 1
    found, slots = total >= n, xp.astype(xp.searchsorted(before, rank), xp.int32) - 1
    return xp.where(found, slots, c), xp.asarray(found)


def plan_slots(
    cells: Cells, head: int, n: int, *, n_used: int | None = None
) -> Int32[np.ndarray, " n"]:
    """Finds n empty cells on the host, the same as `find_slots` does.

    Args:
      cells: the state, in NumPy.
      head: where to start, 0 to n_ctx.
      n: cells wanted.
      n_used: the number of used cells, if it is known; it saves a scan.

    Raises:
      CacheFull: there are no such cells.
    """
    start = _start(cells, head, n, n_used)
    # Mostly the cells at head are empty, and looking at those is all it takes.
    ahead = cells.pos[start : start + n]
    if len(ahead) == n and (n == 0 or ahead.max() < 0):
        return np.arange(start, start + n, dtype=np.int32)
    free = np.flatnonzero(cells.pos < 0).astype(np.int32)
    if len(free) < n:
        raise CacheFull(
            f"batch needs {n} cells, {len(free)} of {n_ctx(cells)} are empty; "
            "remove positions, shift the context or raise n_ctx"
        )
    first = np.searchsorted(free, start)
    late = free[first : first + n]
    return np.concatenate([late, free[: n - len(late)]])


def place(
    cells: Cells,
    slots: Int32[AnyArray, " n"],
    pos: Int32[AnyArray, " n"],
    seq_ids: Int32[AnyArray, " n"],
) -> Cells:
    """Puts tokens into cells: position, owner, nothing pending.

    Args:
      cells: the state.
      slots: cell of each token, all different; n_ctx or more drops the token.
      pos: positions.
      seq_ids: the sequence that owns each token.

    Raises:
      BadRange: on the host, a token that is not dropped has a negative position.
      BadSequence: on the host, the sequence of such a token has no bit.
    """
    if is_host(cells.pos):
        slots, pos, seq_ids = np.asarray(slots), np.asarray(pos), np.asarray(seq_ids)
        if len(slots) == 1:
            return _place_checked(cells, int(slots[0]), int(pos[0]), int(seq_ids[0]))
        return _place_many(cells, slots, pos, seq_ids)
    return Cells(
        pos=put(cells.pos, slots, pos),
        delta=put(cells.delta, slots, 0),
        seqs=put(cells.seqs, slots, owner_bits(cells, seq_ids)),
    )


def place_one(cells: Cells, slot: int, pos: int, seq_id: int) -> Cells:
    """As `place` for the token of a decode step, on the host; its caller has checked it.

    A third of the time of `place` for many tokens, which is all overhead for one.
    """
    word, bit = divmod(seq_id, 32)
    new_pos, seqs, delta = cells.pos.copy(), cells.seqs.copy(), cells.delta
    new_pos[slot] = pos
    seqs[slot] = 0
    seqs[slot, word] = 1 << bit
    if delta[slot]:
        delta = delta.copy()
        delta[slot] = 0
    return Cells(pos=new_pos, delta=delta, seqs=seqs)


def vacate(cells: Cells, blocks: Int32[AnyArray, " F"], block_size: int) -> Cells:
    """With all cells of some blocks empty; runs inside jit.

    Args:
      cells: the state, a whole number of blocks.
      blocks: which; the number of blocks, or more, is padding.
      block_size: cells of a block.
    """
    xp = namespace(cells.pos)
    inside = xp.arange(block_size, dtype=xp.int32)
    which = xp.reshape(blocks[:, None] * block_size + inside[None], (-1,))
    return Cells(
        pos=put(cells.pos, which, -1),
        delta=put(cells.delta, which, 0),
        seqs=put(cells.seqs, which, 0),
    )


def next_head(slots: Int32[AnyArray, " n"], n_cells: int | None = None) -> Scalar:
    """Where the next search starts: behind the last slot, which may be the end of the ring.

    Args:
      slots: as found.
      n_cells: number of cells, if padding may follow the slots; with nothing but padding the
        search starts at 0.
    """
    if n_cells is not None:
        xp = namespace(slots)
        last = xp.count_nonzero(slots < n_cells) - 1
        after = xp.where(last >= 0, slots[last] + 1, 0)
    else:
        after = slots[-1] + 1
    return int(after) if is_host(slots) else after


def first_freed(before: Cells, after: Cells) -> Scalar:
    """The first cell that an operation emptied, or 0: where llama.cpp's seq_add leaves head."""
    xp = namespace(before.pos)
    # argmax of nothing is 0.
    first = xp.argmax((before.pos >= 0) & (after.pos < 0))
    return int(first) if is_host(before.pos) else xp.astype(first, xp.int32)


def lowered_head(before: Cells, after: Cells, head: Scalar) -> Scalar:
    """Head after seq_rm or seq_keep: the first cell that emptied, if before head."""
    xp = namespace(before.pos)
    freed = (before.pos >= 0) & (after.pos < 0)
    if is_host(before.pos):
        return min(int(head), int(np.argmax(freed))) if freed.any() else int(head)
    first = xp.astype(xp.argmax(freed), xp.int32)
    return xp.where(xp.any(freed), xp.minimum(first, head), head)


def blocks_of(
    cells: Cells, seq_ids: Iterable[int] | Int32[np.ndarray, " S"], block_size: int
) -> Int32[np.ndarray, " N"]:
    """The blocks with a cell of any of the sequences, ascending; on the host.

    Args:
      cells: the state, in NumPy; the last block may have fewer cells than the others.
      seq_ids: whose cells.
      block_size: cells of a block.

    Raises:
      BadSequence: an id has no bit.
    """
    wanted = [0] * cells.seqs.shape[1]
    for seq_id in seq_ids:
        word, bit = divmod(check_seq_id(seq_id, n_bits(cells)), 32)
        wanted[word] |= 1 << bit
    firsts = np.arange(0, n_ctx(cells), block_size)
    found = np.zeros(len(firsts), bool)
    for word, bits in enumerate(wanted):
        if bits:
            owners = np.bitwise_or.reduceat(cells.seqs[:, word], firsts)
            found |= (owners & np.uint32(bits)) != 0
    return np.flatnonzero(found).astype(np.int32)


def _start(cells: Cells, head: int, n: int, used: int | None) -> int:
    if head > 2 * n and head > (n_used(cells) if used is None else used) + 2 * n:
        return 0
    return head


def _place_many(cells: Cells, slots: np.ndarray, pos: np.ndarray, seq_ids: np.ndarray) -> Cells:
    kept = slots < n_ctx(cells)
    if not kept.all():
        slots, pos, seq_ids = slots[kept], pos[kept], seq_ids[kept]
    checks.check_placed(pos, seq_ids, n_bits(cells))
    new_pos, seqs = cells.pos.copy(), cells.seqs.copy()
    new_pos[slots] = pos
    seqs[slots] = 0
    seqs[slots, seq_ids >> 5] = np.left_shift(np.uint32(1), (seq_ids & 31).astype(np.uint32))
    # An empty cell has nothing pending, so the array is mostly shared with the old state.
    delta = put(cells.delta, slots, 0) if cells.delta[slots].any() else cells.delta
    return Cells(pos=new_pos, delta=delta, seqs=seqs)


def _place_checked(cells: Cells, slot: int, pos: int, seq_id: int) -> Cells:
    if slot >= n_ctx(cells):
        return cells
    check_range(pos, None)
    return place_one(cells, slot, pos, check_seq_id(seq_id, n_bits(cells)))

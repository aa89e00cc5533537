"""Sequences whose tokens lie in blocks: the cell of each token, and which cells are copied there.

A block is `size` consecutive cells. Of a sequence in blocks the token of position p lies in block
table[p // size], p % size cells behind its first; with blocks of 4 cells and table (2, 0, -1, 1):

    cell   0  1  2  3 | 4  5  6  7 | 8  9 10 11
    pos    4  5  6  7 |12 13  .  . | 0  1  2  3

Block tables are not stored but computed from positions and owners, so that no edit has a table to
update, and a block without a token is free. Empty cells of a block in which a sequence in blocks
has a token are reserved for that sequence. Sequences share a block as long as they share its
tokens; a sequence that writes to a shared block moves to a block of its own first.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import AnyArray, Bool, Int32
from kvrt.cells import slots
from kvrt.cells.cells import Cells, n_ctx, owned, seq_words
from kvrt.errors import CacheFull, UsageError

# Cells to copy, from and to; without an axis letter, for groups differ in how many they copy.
CellCopies = tuple[Int32[np.ndarray, " _"], Int32[np.ndarray, " _"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Which sequences lie in blocks.

    Attributes:
      size: cells of a block.
      seqs: sequences, at least one; one without tokens will lie in blocks from its first on.
    """

    size: int
    seqs: frozenset[int]


def no_copies() -> CellCopies:
    """Nothing to copy."""
    return np.zeros(0, np.int32), np.zeros(0, np.int32)


def block_table(cells: Cells, seq_id: int, size: int) -> tuple[int, ...]:
    """Blocks of a sequence in blocks by position // size, -1 where it has no token."""
    entries = _entries(cells, seq_id, size)
    return tuple(entries.get(i, -1) for i in range(max(entries, default=-1) + 1))


def reserved(cells: Cells, blocks: Blocks) -> Bool[np.ndarray, " C"]:
    """Empty cells that only a sequence in blocks may take."""
    return _within(cells, slots.blocks_of(cells, blocks.seqs, blocks.size), blocks.size) & (
        cells.pos < 0
    )


def arrange(cells: Cells, seq_id: int, blocks: Blocks) -> tuple[Cells, CellCopies]:
    """Moves a sequence's tokens to their cells in blocks.

    An entry of the table keeps its block where all its tokens lie in their cells, whoever else has
    tokens there, or where nobody else has: then the block takes in what the entry lacks. The other
    entries get empty blocks. Cells that another sequence owns as well are copied, and the originals
    stay its own.

    Args:
      cells: on the host.
      seq_id: whose tokens.
      blocks: sequences that lie in blocks already, seq_id among them or not.

    Returns:
      The cells, and which to copy into empty ones; none where all tokens are in their cells.

    Raises:
      CacheFull: too few blocks are empty.
      UsageError: the sequence has a position twice.
    """
    size = blocks.size
    mine = np.flatnonzero(owned(cells, seq_id)).astype(np.int32)
    pos = np.asarray(cells.pos)[mine]
    _check_once(seq_id, pos)
    entries, which = np.unique(pos // size, return_inverse=True)
    stays = _staying(cells, seq_id, blocks, mine, which, len(entries))
    lacking = np.flatnonzero(stays < 0)
    empty = _empty(cells, size)
    if len(lacking) > len(empty):
        raise _too_few(f"sequence {seq_id}", len(lacking), empty, cells, size)
    stays[lacking] = empty[: len(lacking)]
    dst = stays[which] * np.int32(size) + pos % size
    return _moved(cells, seq_id, mine[dst != mine], dst[dst != mine])


def leave_shared_blocks(
    cells: Cells, blocks: Blocks, wanted: Mapping[int, tuple[int, int]]
) -> tuple[Cells, CellCopies]:
    """Moves sequences in blocks out of shared blocks that they are about to write to.

    Args:
      cells: on the host.
      blocks: which sequences lie in blocks.
      wanted: by sequence, the range of positions that it is about to write.

    Returns:
      The cells, and which to copy.

    Raises:
      CacheFull: too few blocks are empty.
    """
    size, parts = blocks.size, [no_copies()]
    for s in sorted(blocks.seqs & wanted.keys()):
        start, end = wanted[s]
        entries = _entries(cells, s, size)
        touched = [b for i, b in entries.items() if start // size <= i <= (end - 1) // size]
        leaves = [b for b in touched if _shared(cells, s, b, blocks)]
        empty = _empty(cells, size)
        if len(leaves) > len(empty):
            raise _too_few(f"sequence {s}", len(leaves), empty, cells, size)
        mine = owned(cells, s)
        for old, new in zip(leaves, empty.tolist(), strict=False):
            src = np.flatnonzero(mine & _within(cells, [old], size)).astype(np.int32)
            cells, copies = _moved(cells, s, src, src + np.int32((new - old) * size))
            parts.append(copies)
    src, dst = (np.concatenate(x) for x in zip(*parts, strict=True))
    return cells, (src, dst)


def plan_in_blocks(
    cells: Cells,
    blocks: Blocks,
    head: int,
    seq_ids: Int32[np.ndarray, " n"],
    pos: Int32[np.ndarray, " n"],
) -> Int32[np.ndarray, " n"]:
    """Cells for new tokens: those of sequences in blocks in their blocks, others in ring order.

    Args:
      cells: on the host; the cells in blocks are empty, see `leave_shared_blocks`.
      blocks: which sequences lie in blocks.
      head: where the search for other tokens starts.
      seq_ids: sequence of each token.
      pos: positions.

    Raises:
      CacheFull: too few blocks or cells are empty.
    """
    size = np.int32(blocks.size)
    out, inside = np.empty(len(pos), np.int32), np.zeros(len(pos), bool)
    empty = _empty(cells, blocks.size)
    n_taken = 0
    for s in sorted(blocks.seqs & set(seq_ids.tolist())):
        here = seq_ids == s
        table = _entries(cells, s, blocks.size)
        entries, which = np.unique(pos[here] // size, return_inverse=True)
        new = [i for i in entries.tolist() if i not in table]
        if n_taken + len(new) > len(empty):
            n = n_taken + len(new)
            raise _too_few(f"{len(pos)} tokens", n, empty, cells, blocks.size)
        table |= zip(new, empty[n_taken:].tolist(), strict=False)
        n_taken += len(new)
        at = np.array([table[i] for i in entries.tolist()], np.int32)
        out[here] = at[which] * size + pos[here] % size
        inside |= here
    assert (cells.pos[out[inside]] < 0).all(), "a cell is taken: copy_on_write comes first"
    n = int(np.count_nonzero(~inside))
    out[~inside] = ring(cells, blocks, head, n, taken=empty[:n_taken].tolist())
    return out


def ring(
    cells: Cells, blocks: Blocks, head: int, n: int, *, taken: list[int] | None = None
) -> Int32[np.ndarray, " n"]:
    """Empty cells in ring order, without reserved ones and those of the blocks `taken`.

    Raises:
      CacheFull: there are too few.
    """
    if n == 0:
        return np.zeros(0, np.int32)
    kept = reserved(cells, blocks) | _within(cells, taken or [], blocks.size)
    shadow = dataclasses.replace(cells, pos=np.where(kept, np.int32(0), cells.pos))
    return slots.plan_slots(shadow, head, n)


def n_room(cells: Cells, blocks: Blocks, seq_id: int, first: int) -> int:
    """Tokens from position `first` on that a sequence in blocks has room for."""
    try:
        cells, _ = leave_shared_blocks(cells, blocks, {seq_id: (first, first + 1)})
    except CacheFull:
        return 0
    n = len(_empty(cells, blocks.size)) * blocks.size
    begun = first // blocks.size in _entries(cells, seq_id, blocks.size)
    return max(n + (blocks.size if begun else 0) - first % blocks.size, 0)


def _entries(cells: Cells, seq_id: int, size: int) -> dict[int, int]:
    """Blocks by position // size, of a sequence in blocks."""
    # All its tokens in a block are of one entry, so any of them tells which.
    pos = np.where(owned(cells, seq_id), cells.pos, -1)
    greatest = np.maximum.reduceat(pos, np.arange(0, len(pos), size))
    used = np.flatnonzero(greatest >= 0)
    return dict(zip((greatest[used] // size).tolist(), used.tolist(), strict=True))


def _staying(
    cells: Cells, seq_id: int, blocks: Blocks, mine: np.ndarray, which: np.ndarray, n: int
) -> Int32[np.ndarray, " n"]:
    """By table entry the block that it keeps, -1 for none."""
    size = blocks.size
    others = set(slots.blocks_of(cells, blocks.seqs - {seq_id}, size).tolist())
    used = np.bincount(np.flatnonzero(cells.pos >= 0) // size, minlength=n_ctx(cells) // size + 1)
    right = (mine % size == cells.pos[mine] % size) & (mine // size < n_ctx(cells) // size)
    pairs = np.stack([which[right], mine[right] // size], axis=1)
    found, n_right = np.unique(pairs, axis=0, return_counts=True)
    n_tokens, n_mine = np.bincount(which, minlength=n), np.bincount(mine // size)
    out, best = np.full(n, -1, np.int32), np.zeros(n, int)
    for (i, b), here in zip(found.tolist(), n_right.tolist(), strict=True):
        # What others have as well may be shared until somebody writes to it, but not added to.
        complete = here == n_tokens[i] and here == n_mine[b]
        fits = complete or (used[b] == here and b not in others)
        if fits and here > best[i]:
            out[i], best[i] = b, here
    return out


def _shared(cells: Cells, seq_id: int, block: int, blocks: Blocks) -> bool:
    """Whether others have tokens in a block, or another sequence in blocks lies there."""
    here = slice(block * blocks.size, (block + 1) * blocks.size)
    inside = Cells(pos=cells.pos[here], delta=cells.delta[here], seqs=cells.seqs[here])
    foreign = (inside.pos >= 0) & ~owned(inside, seq_id)
    return bool(foreign.any()) or any(owned(inside, s).any() for s in blocks.seqs - {seq_id})


def _empty(cells: Cells, size: int) -> Int32[np.ndarray, " N"]:
    """Whole blocks without a token, ascending."""
    n = n_ctx(cells) // size
    return np.flatnonzero((cells.pos[: n * size] < 0).reshape(n, size).all(axis=1)).astype(np.int32)


def _within(cells: Cells, which: AnyArray | list[int], size: int) -> Bool[np.ndarray, " C"]:
    """Cells of some blocks."""
    chosen = np.zeros(-(-n_ctx(cells) // size), bool)
    chosen[np.asarray(which, np.int32)] = True
    return np.repeat(chosen, size)[: n_ctx(cells)]


def _moved(cells: Cells, seq_id: int, src: np.ndarray, dst: np.ndarray) -> tuple[Cells, CellCopies]:
    """The cells after a sequence left src for copies in empty cells dst."""
    if not len(src):
        return cells, no_copies()
    pos, delta, seqs = cells.pos.copy(), cells.delta.copy(), cells.seqs.copy()
    bits = seq_words(cells, seq_id)
    pos[dst], delta[dst], seqs[dst] = pos[src], delta[src], bits
    seqs[src] &= ~bits
    gone = src[~seqs[src].any(axis=1)]
    pos[gone], delta[gone] = -1, 0
    return Cells(pos=pos, delta=delta, seqs=seqs), (src, dst.astype(np.int32))


def _check_once(seq_id: int, pos: np.ndarray) -> None:
    found, n = np.unique(pos, return_counts=True)
    if len(found) < len(pos):
        raise UsageError(
            f"sequence {seq_id} holds position {found[n > 1][0]} {n.max()} times, a block has one "
            "place for it; sequences that were divided or joined stay in cells"
        )


def _too_few(what: str, n: int, empty: np.ndarray, cells: Cells, size: int) -> CacheFull:
    return CacheFull(
        f"{what} in blocks: {n} empty blocks of {size} cells are needed, {len(empty)} of "
        f"{n_ctx(cells) // size} are empty; remove positions, pack the cache with defrag while all "
        "sequences are in cells, or raise n_ctx"
    )

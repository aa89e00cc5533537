"""Which sequences own which cells of a file, and one check of that for every format.

A file may contradict itself with every digest in order: a cell of a sequence that holds no such
token, a token without a cell, two tokens that share a mark and not their id. What is refused here
could not have been saved by any cache.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Bool, Int32, UInt32
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import SavedCells
from kvrt.cellcache.window import Intervals
from kvrt.config import MAX_POS, MAX_SEQUENCES
from kvrt.errors import BadSession


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owned:
    """Positions and owners of cells.

    Attributes:
      pos: position of each cell.
      cell: index of a cell, ascending, once for each of its owners.
      seq: that owner.
    """

    pos: Int32[np.ndarray, " n"]
    cell: Int32[np.ndarray, " m"]
    seq: Int32[np.ndarray, " m"]

    @property
    def seq_ids(self) -> list[int]:
        """Sequences that own something, ascending."""
        return np.unique(self.seq).tolist()

    def of(self, seq_id: int) -> Int32[np.ndarray, " k"]:
        """Cells of a sequence, by position."""
        cells = self.cell[self.seq == seq_id]
        return cells[np.argsort(self.pos[cells], kind="stable")]


def check_owned(name: str, owned: Owned) -> None:
    """Refuses positions and owners of a format in which no two tokens share a position.

    Raises:
      BadSession: a position below 0 or beyond 2^31 - 2, an owner beyond 4,095, or two cells of a
        sequence at one position.
    """
    check_ranges(name, owned)
    found = twice(owned)
    if found is not None:
        raise BadSession(
            f"{name}: two cells of sequence {found[0]} at position {found[1]}, one is allowed; the "
            "file is damaged, or of a sequence whose tokens share positions"
        )


def check_ranges(name: str, owned: Owned) -> None:
    """Refuses positions and owners that no cache has.

    Raises:
      BadSession: a position below 0 or beyond 2^31 - 2, or an owner beyond 4,095.
    """
    for what, values, limit in (
        ("position", owned.pos, MAX_POS),
        ("sequence", owned.seq, MAX_SEQUENCES),
    ):
        wrong = values[(values < 0) | (values >= limit)]
        if wrong.size:
            raise BadSession(
                f"{name}: {what} {wrong[0]} is outside [0, {limit}); the file is damaged, make it "
                "again"
            )


def check_cells(name: str, groups: Sequence[SavedCells], text: TokenHistory) -> None:
    """Refuses cells and token histories that contradict each other.

    Every owner of a cell has a token at the cell's position, and every token has a cell in every
    group, but where a windowed group says that it has lost the position.

    Args:
      name: of the file, or of its part.
      groups: cells of each group of layers.
      text: tokens of every sequence.

    Raises:
      BadSession: they do.
    """
    held = _check_text(name, text)
    n_tokens, wanted = held.size, np.unique(held)
    for i, part in enumerate(groups):
        where = f"{name}: group {i}"
        _check_index(where, part)
        # Before owners are spread out: a few words of bits could stand for thousands of them.
        if int(np.bitwise_count(part.seqs).sum(dtype=np.int64)) > 2 * n_tokens:
            raise BadSession(
                f"{where}: its cells have more owners than there are tokens, {n_tokens}; the "
                "file is damaged, make it again"
            )
        owned = owners_of(part.pos, part.seqs)
        check_ranges(where, owned)
        # How many tokens share a position may differ: windowed groups share cells for longer.
        found = np.unique(as_numbers(owned))
        if not np.array_equal(found, wanted):
            _check_lost(where, found, wanted, part)


def twice(owned: Owned) -> tuple[int, int] | None:
    """A sequence and a position at which it has two cells, if there is one."""
    values, counts = np.unique(as_numbers(owned), return_counts=True)
    if values.size == len(owned.seq):
        return None
    return _pair(values[counts > 1][0])


def n_words(owned: Owned) -> int:
    """Words of bits that the greatest owner needs."""
    return int(owned.seq.max(initial=0)) // 32 + 1


def owner_words(owned: Owned, n_words: int) -> UInt32[np.ndarray, "n W"]:
    """Owners as bits."""
    words = np.zeros((len(owned.pos), n_words), np.uint32)
    bits = np.left_shift(np.uint32(1), (owned.seq % 32).astype(np.uint32))
    np.bitwise_or.at(words, (owned.cell, owned.seq // 32), bits)
    return words


def owners_of(pos: Int32[np.ndarray, " n"], words: UInt32[np.ndarray, "n W"]) -> Owned:
    """The owners that bits stand for."""
    cells, seqs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    # Word by word: all of them at once would take 32 times the memory of the words.
    for i in range(words.shape[1]):
        used = np.flatnonzero(words[:, i])
        octets = words[used, i].astype("<u4").view(np.uint8).reshape(-1, 4)
        row, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
        cells.append(used[row])
        seqs.append(32 * i + bit)
    cell, seq = np.concatenate(cells), np.concatenate(seqs)
    order = np.argsort(cell, kind="stable")
    return Owned(pos=pos, cell=cell[order].astype(np.int32), seq=seq[order].astype(np.int32))


def narrowed(owned: Owned, keep: Bool[np.ndarray, " n"]) -> Owned:
    """Some of the cells, numbered anew."""
    number = np.cumsum(keep, dtype=np.int32) - 1
    mine = keep[owned.cell]
    return Owned(
        pos=owned.pos[keep], cell=number[owned.cell[mine]].astype(np.int32), seq=owned.seq[mine]
    )


def as_numbers(owned: Owned) -> np.ndarray:
    """Sequence and position of every owned cell as one number."""
    return (owned.seq.astype(np.int64) << 32) + owned.pos[owned.cell]


def _pair(value: np.integer) -> tuple[int, int]:
    """Sequence and position of such a number."""
    return divmod(int(value), 1 << 32)


def _check_index(where: str, part: SavedCells) -> None:
    index, pos = part.index, part.pos
    sound = (
        len(index) == 0
        or (
            0 <= index[0]
            and index[-1] < part.n_cells
            # Compared, not subtracted: a difference of int32 wraps.
            and bool(np.all(index[1:] > index[:-1]))
            and pos.min() >= 0
            and bool(np.all(part.seqs.any(axis=1)))
        )
    )
    if not sound:
        raise BadSession(
            f"{where}: its cells are damaged: their numbers must ascend within [0, {part.n_cells})"
            ", and each needs an owner; make the file again"
        )


def _check_text(name: str, text: TokenHistory) -> np.ndarray:
    """Sequence and position of every token as one number."""
    held = [(s, piece) for s, pieces in text.pieces.items() for piece in pieces]
    if not held:
        return np.zeros(0, np.int64)
    seq = np.concatenate([np.full(piece.shape[1], s, np.int64) for s, piece in held])
    pos, ids, mark = np.concatenate([piece for _, piece in held], axis=1)
    for what, values, limit in (("position", pos, MAX_POS), ("mark", mark, text.n_marks)):
        wrong = values[(values < 0) | (values >= limit)]
        if wrong.size:
            raise BadSession(
                f"{name}: a token has {what} {wrong[0]}, outside [0, {limit}); the file is "
                "damaged, make it again"
            )
    order = np.lexsort((seq, mark))
    same = mark[order][1:] == mark[order][:-1]
    a, b = order[:-1][same], order[1:][same]
    wrong = b[(seq[a] == seq[b]) | (pos[a] != pos[b]) | (ids[a] != ids[b])]
    if wrong.size:
        raise BadSession(
            f"{name}: the token of sequence {seq[wrong[0]]} at position {pos[wrong[0]]} is said to "
            "be that of another place, and is not; the file is damaged, make it again"
        )
    return (seq << 32) + pos


def _check_lost(where: str, found: np.ndarray, wanted: np.ndarray, part: SavedCells) -> None:
    """Refuses cells without a token, and tokens whose cells are neither there nor lost."""
    strange = np.setdiff1d(found, wanted, assume_unique=True)
    if strange.size:
        seq, pos = _pair(strange[0])
        raise BadSession(
            f"{where}: a cell at position {pos} belongs to sequence {seq}, which has no token for "
            "it; the file is damaged, make it again"
        )
    missing = np.setdiff1d(wanted, found, assume_unique=True)
    seqs, first = np.unique(missing >> 32, return_index=True)
    for seq, pos in zip(seqs.tolist(), np.split(missing & 0xFFFFFFFF, first[1:]), strict=False):
        gone = pos[~_within(pos, part.lost.get(seq, ()))]
        if gone.size:
            raise BadSession(
                f"{where}: no cell holds position {gone[0]} of sequence {seq}, and nothing says "
                "that it was dropped; the file is damaged, make it again"
            )


def _within(pos: np.ndarray, lost: Intervals) -> np.ndarray:
    """Which positions lie in ascending disjoint intervals."""
    if not lost:
        return np.zeros(len(pos), bool)
    ends = np.array(lost, np.int64)
    at = np.searchsorted(ends[:, 0], pos, side="right") - 1
    return (at >= 0) & (pos < ends[np.maximum(at, 0), 1])

"""Rules of each kind of group: which blocks serve a hit, which are no longer needed.

These objects hold no state: tables and pools are arguments. Hits, blocks and tokens are those of
one group; `kvrt.paged.hits` brings groups together.

Source: vLLM's single-type managers, and arXiv:2309.06180.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from kvrt.paged.layout.spec import NULL, PagedGroup
from kvrt.paged.lookup import BlockIds, Lookup


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupHit:
    """A hit of n_tokens, and its blocks, in groups looked up together."""

    n_tokens: int
    blocks: list[BlockIds]


@runtime_checkable
class Moving(Protocol):
    """A request that drops tokens, so that later ones move down.

    Its positions change, so no other request may have blocks that move, and it can never be refused
    a block in the middle: from its admission on it has as many as it will ever have at once. Blocks
    that it has no use for now are spare; what slides out of a window, and what is dropped, goes
    there too.
    """

    @property
    def n_most(self) -> int:
        """Tokens that it has at once at most."""
        ...

    @property
    def n_keep(self) -> int:
        """Its first tokens, which it never drops."""
        ...

    @property
    def n_left(self) -> int:
        """Tokens that each of its drops leaves, at least."""
        ...


def ceil_div(n: int, by: int) -> int:
    """How many pieces of a size n takes."""
    return -(-n // by)


class FullKind:
    """Every later token sees all: a hit is a prefix, and any shorter prefix is a hit too.

    Attributes:
      group: whose blocks these are.
      align: hits are multiples of it, in tokens.
      n_recomputed: tokens at the end of a hit that are computed again, in blocks or, where hits end
        within blocks, in what they are multiples of.
      pool: index of the pool that its blocks come from.
      prefix_closed: whether any prefix of a hit is a hit.
      slides: whether later tokens no longer see early ones.
      keeps_states: whether a block is a state, and not keys and values of tokens.
      has_blocks: whether it has blocks of its own.
    """

    prefix_closed, slides, keeps_states, has_blocks = True, False, False, True

    def __init__(self, group: PagedGroup, align: int, *, drafts: bool = False):
        """For one group; drafts start with a token whose last block is computed again."""
        self.group = group
        self.align = align
        self.block_size, self.pool = group.block_size, group.pool
        self.n_recomputed = min(self.block_size, align) if drafts else 0

    def find(self, lookup: Lookup, n_max: int, moving: Moving | None = None) -> GroupHit:
        """The longest hit of at most n_max tokens; of all that a request which moves will need."""
        b, align, blocks = self.block_size, self.align, []
        top = min(n_max + self.n_recomputed, lookup.n_max)
        fine = align % b > 0  # hits may end within a block
        n_blocks = ceil_div(top, b) if fine else top // b
        while len(blocks) < n_blocks and (ids := lookup.block(len(blocks))):
            blocks.append(ids)
        n = min(len(blocks) * b, top)
        if fine:
            last = min(top, len(blocks) * b + b - 1) // align * align
            for end in range(last, len(blocks) * b, -align):
                if ids := lookup.part(end):
                    n, blocks = end, [*blocks, ids]
                    break
        n = max(n // align * align - self.n_recomputed, 0) // align * align
        return GroupHit(n_tokens=n, blocks=blocks[: ceil_div(n, b)])

    def n_head(self, moving: Moving | None = None) -> int:
        """Blocks at the beginning that stay while later ones go."""
        return 0

    def n_skipped(self, n_tokens: int, moving: Moving | None = None) -> int:
        """Of n_tokens, how many at the beginning no later token sees; see `ChunkedKind`."""
        return 0

    def n_new(self, n_entries: int, n_tokens: int, n_lookahead: int) -> int:
        """Blocks that a table of n_entries lacks for n_tokens and drafts after them."""
        return max(ceil_div(n_tokens + n_lookahead, self.block_size) - n_entries, 0)

    def grown(self, table: Sequence[int], n_tokens: int, fresh: list[int]) -> list[int]:
        """Entries to append so that a table has room for n_tokens, with these blocks."""
        return fresh

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
        """The most blocks that a sequence of n_tokens has at once."""
        return ceil_div(n_tokens, self.block_size)

    def n_reserved(self, moving: Moving, n_in_flight: int) -> int:
        """The most blocks that a request which drops tokens, and moves others, has at once."""
        return ceil_div(moving.n_most + self.n_gap(moving), self.block_size)

    def n_gap(self, moving: Moving) -> int:
        """Cells of dropped tokens that lie between those that stay and those that moved, at most.

        They are in the last block that stays, and in the first one that moves.
        """
        return -moving.n_keep % self.block_size + self.block_size - 1

    def serves_hit(self, index: int, segment: int, marks: Collection[int]) -> bool:
        """Whether a hit can end so that it needs block `index`.

        Args:
          index: of the block in its table.
          segment: hits that end at multiples of it are kept, in tokens; 0 is none.
          marks: further ends of hits that are kept.
        """
        return True


class SlidingKind(FullKind):
    """A token sees some of the last tokens, and sinks: a hit ends with a run of blocks.

    A block goes when no later token sees it, but for those at the beginning that hold sinks, or
    tokens that a drop would let later ones see again.
    """

    prefix_closed, slides = False, True

    def n_head(self, moving: Moving | None = None) -> int:
        """Blocks at the beginning that stay."""
        n = self.group.n_sink
        if moving is not None and self.n_skipped(moving.n_left, moving) < moving.n_keep:
            n = max(n, moving.n_keep)
        return ceil_div(n, self.block_size)

    def find(self, lookup: Lookup, n_max: int, moving: Moving | None = None) -> GroupHit:
        """The longest hit of at most n_max tokens; what slid out before its end needs no block."""
        b, fine, head = self.block_size, self.align % self.block_size > 0, []
        n = min(n_max + self.n_recomputed, lookup.n_max) - self.n_recomputed
        while len(head) < self.n_head(moving) and (ids := lookup.block(len(head))):
            head.append(ids)
        if len(head) < self.n_head(moving):
            n = min(n, (len(head) + 1) * b - 1 if fine else len(head) * b)
        while (n := n // self.align * self.align) > 0:
            blocks, n_next = self._run(lookup, n)
            if blocks is not None:
                blocks[: len(head)] = head[: len(blocks)]
                return GroupHit(n_tokens=n, blocks=blocks)
            n = n_next
        return GroupHit(n_tokens=0, blocks=[])

    def _run(self, lookup: Lookup, n: int) -> tuple[list[BlockIds] | None, int]:
        """What a hit of n tokens needs without sinks; None, and where the next one may end."""
        b, end = self.block_size, n + self.n_recomputed
        blocks = [lookup.nothing] * ceil_div(end, b)
        for i in range(len(blocks) - 1, self.n_skipped(n) // b - 1, -1):
            ids = lookup.block(i)
            if ids is None and end < (i + 1) * b:
                ids = lookup.part(end)
                if ids is None:
                    return None, n - self.align
            if ids is None:
                last = (i + 1) * b - 1 if self.align % b else i * b
                return None, last - self.n_recomputed
            blocks[i] = ids
        return blocks[: ceil_div(n, b)], n

    def serves_hit(self, index: int, segment: int, marks: Collection[int]) -> bool:
        """Whether a hit can end so that it needs block `index`."""
        # Of the run that serves a hit, what is computed again lies after its end.
        start = index * self.block_size - self.n_recomputed
        if index < self.n_head() or any(self._serves(index, start, mark) for mark in marks):
            return True
        # A hit of no tokens is none, so the least end that counts is the first after 0.
        return segment > 0 and self._serves(index, start, (max(start, 0) // segment + 1) * segment)

    def _serves(self, index: int, start: int, end: int) -> bool:
        return start < end and self.n_skipped(end) // self.block_size <= index

    def n_reserved(self, moving: Moving, n_in_flight: int) -> int:
        """The most blocks that a request which moves has at once, with those that others find."""
        b, n_head = self.block_size, self.n_head(moving)
        whole = super().n_reserved(moving, n_in_flight)
        size = ceil_div(self.group.size - 1 + n_in_flight, b) + 1
        if n_head * b >= moving.n_keep:
            return min(whole, n_head + size + ceil_div(self.n_gap(moving), b))
        # What it shares goes to others when it slides out: the run that a hit gave, and those of
        # the two ends that others may find (see `Transactions.register`).
        n_found = min(3 * (ceil_div(self.group.size - 1, b) + 1), ceil_div(moving.n_keep, b))
        return min(whole, n_head + size) + n_found


class WindowKind(SlidingKind):
    """A token sees the last `size` tokens, itself included."""

    def n_skipped(self, n_tokens: int, moving: Moving | None = None) -> int:
        """Of n_tokens, how many at the beginning no later token sees but as sinks."""
        return max(0, n_tokens - self.group.size + 1)

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
        """The most blocks that a sequence of n_tokens has at once."""
        b = self.block_size
        seen = min(self.group.size - 1 + n_in_flight, n_tokens)
        return min(ceil_div(seen, b) + 1 + self.n_head(), ceil_div(n_tokens, b))


class ChunkedKind(SlidingKind):
    """A token sees its own chunk of `size` tokens up to itself."""

    def n_skipped(self, n_tokens: int, moving: Moving | None = None) -> int:
        """Of n_tokens, how many at the beginning no later token sees but as sinks.

        Where tokens move a chunk may begin anywhere among the last `size`.
        """
        size = self.group.size
        return n_tokens // size * size if moving is None else max(0, n_tokens - size + 1)

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
        """The most blocks that a sequence of n_tokens has at once."""
        # A chunk that begins within a block holds what comes before it there as well.
        b, size = self.block_size, self.group.size
        seen = min(size + n_in_flight + b - math.gcd(size, b), n_tokens)
        return min(ceil_div(seen, b) + self.n_head(), ceil_div(n_tokens, b))


class RecurrentKind(FullKind):
    """One state stands for all tokens so far; block i is the last state within its tokens.

    A step writes the states after its last `depth` tokens, so the blocks that it skips stay null,
    and only a step that ends with a block leaves a state that others can resume from.
    """

    prefix_closed, slides, keeps_states = False, True, True

    def find(self, lookup: Lookup, n_max: int, moving: Moving | None = None) -> GroupHit:
        """The longest hit of at most n_max tokens: one state at its end."""
        for n in range(n_max // self.align * self.align, 0, -self.align):
            index, inside = divmod(n - 1, self.block_size)
            whole = inside == self.block_size - 1
            if ids := (lookup.block(index) if whole else lookup.part(n)):
                return GroupHit(n_tokens=n, blocks=[lookup.nothing] * index + [ids])
        return GroupHit(n_tokens=0, blocks=[])

    def n_skipped(self, n_tokens: int, moving: Moving | None = None) -> int:
        """Of n_tokens, how many lie before those whose states are kept."""
        return max(0, n_tokens - self.group.depth)

    def n_new(self, n_entries: int, n_tokens: int, n_lookahead: int) -> int:
        """Blocks of the states that come to lie in others; drafts get none."""
        n = ceil_div(n_tokens, self.block_size) - n_entries
        return max(min(n, self.group.depth), 0)

    def grown(self, table: Sequence[int], n_tokens: int, fresh: list[int]) -> list[int]:
        """Null blocks for those that are skipped, and those for the last states."""
        n_skipped_blocks = ceil_div(n_tokens, self.block_size) - len(table) - len(fresh)
        return [NULL] * n_skipped_blocks + fresh if fresh else []

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
        """The most blocks that a sequence of n_tokens has at once: one is read, one is written."""
        return min(2 * self.group.depth, ceil_div(n_tokens, self.block_size))

    def n_reserved(self, moving: Moving, n_in_flight: int) -> int:
        """As many as any other sequence has."""
        return 2 * self.group.depth

    def serves_hit(self, index: int, segment: int, marks: Collection[int]) -> bool:
        """Whether a hit can end just after block `index`."""
        end = (index + 1) * self.block_size
        is_marked = any(0 <= mark - end < self.group.depth for mark in marks)
        return is_marked or (segment > 0 and end % segment == 0)


class SharedKind(FullKind):
    """Layers that read another group's blocks: they have none (issue 20: `kv_of`)."""

    has_blocks = False

    def n_new(self, n_entries: int, n_tokens: int, n_lookahead: int) -> int:
        """None."""
        return 0

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
        """None."""
        return 0

    def n_reserved(self, moving: Moving, n_in_flight: int) -> int:
        """None."""
        return 0


_KINDS: dict[str, type[FullKind]] = {
    "full": FullKind,
    "window": WindowKind,
    "chunked": ChunkedKind,
    "recurrent": RecurrentKind,
    "shared": SharedKind,
}


def kind_of(group: PagedGroup, align: int, *, drafts: bool = False) -> FullKind:
    """The rules of a group.

    Args:
      group: whose blocks these are.
      align: hits are multiples of it, in tokens.
      drafts: its layers draft tokens, and need the last block of a hit computed again.
    """
    return _KINDS[group.kind](group, align, drafts=drafts)

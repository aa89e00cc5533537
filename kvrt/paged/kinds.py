"""Rules of each kind of group: which blocks serve a hit, which are no longer needed.

These objects hold no state: tables and pools are arguments. Hits, blocks and tokens are those of
one group; `kvrt.paged.hits` brings groups together.

Source: vLLM's single-type managers, and arXiv:2309.06180.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence

from kvrt.paged.layout.spec import NULL, PagedGroup
from kvrt.paged.lookup import BlockIds, Lookup


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupHit:
    """A hit of n_tokens, and its blocks, in groups looked up together."""

    n_tokens: int
    blocks: list[BlockIds]


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

    def find(self, lookup: Lookup, n_max: int) -> GroupHit:
        """The longest hit of at most n_max tokens."""
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

    def n_skipped(self, n_tokens: int) -> int:
        """Of n_tokens, how many at the beginning no later token sees."""
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

    def serves_hit(self, index: int, segment: int, marks: Collection[int]) -> bool:
        """Whether a hit can end so that it needs block `index`.

        Args:
          index: of the block in its table.
          segment: hits that end at multiples of it are kept, in tokens; 0 is none.
          marks: further ends of hits that are kept.
        """
        return True


class WindowKind(FullKind):
    """A token sees the last `size` tokens, itself included: a hit ends with a run of blocks."""

    prefix_closed, slides = False, True

    @property
    def n_run(self) -> int:
        """Blocks that the next token sees at most, and the one that is computed again."""
        return ceil_div(self.group.size - 1 + self.n_recomputed, self.block_size)

    def find(self, lookup: Lookup, n_max: int) -> GroupHit:
        """The longest hit of at most n_max tokens."""
        b, n_run, n_recomputed = self.block_size, self.n_run, self.n_recomputed // self.block_size
        blocks: list[BlockIds] = []  # of the run, last first
        end = i = min(n_max + self.n_recomputed, lookup.n_max) // b
        while i > 0 and len(blocks) < n_run:
            i -= 1
            if not blocks:
                end = i + 1
            aligned = (end - n_recomputed) * b % self.align == 0
            ids = lookup.block(i) if blocks or aligned else None
            if ids:
                blocks.append(ids)
            else:
                blocks = []
        if not n_run:  # only its own token: there is nothing to look for
            end = n_max // self.align * self.align // b
        elif not blocks:
            end = 0
        run = ([lookup.nothing] * (end - len(blocks)) + blocks[::-1])[: max(end - n_recomputed, 0)]
        return GroupHit(n_tokens=len(run) * b, blocks=run)

    def n_skipped(self, n_tokens: int) -> int:
        """Of n_tokens, how many at the beginning no later token sees."""
        return max(0, n_tokens - self.group.size + 1)

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
        """The most blocks that a sequence of n_tokens has at once."""
        b = self.block_size
        seen = min(self.group.size - 1 + n_in_flight, n_tokens)
        return min(ceil_div(seen, b) + 1, ceil_div(n_tokens, b))

    def serves_hit(self, index: int, segment: int, marks: Collection[int]) -> bool:
        """Whether a hit can end so that it needs block `index`."""
        # Of the run that serves a hit, what is computed again lies after its end.
        start = index * self.block_size - self.n_recomputed
        last = start + self.n_run * self.block_size
        # A hit of no tokens is none, so the least end that counts is the first after 0.
        in_segment = segment > 0 and (max(start, 0) // segment + 1) * segment <= last
        return in_segment or any(start < mark <= last for mark in marks)


class ChunkedKind(FullKind):
    """A token sees its own chunk of `size` tokens up to itself."""

    prefix_closed, slides = False, True

    def find(self, lookup: Lookup, n_max: int) -> GroupHit:
        """The longest hit of at most n_max tokens; whole chunks before its end need no block."""
        b, n = self.block_size, n_max // self.align * self.align
        while True:
            first = self.n_skipped(n) // b
            run: list[BlockIds] = []
            while first + len(run) < n // b and (ids := lookup.block(first + len(run))):
                run.append(ids)
            end = (first + len(run)) * b
            if end >= n:
                return GroupHit(n_tokens=n, blocks=[lookup.nothing] * first + run)
            # What is missing lies in the chunk, or in the block where the chunk begins.
            n = end // self.align * self.align

    def n_skipped(self, n_tokens: int) -> int:
        """Of n_tokens, how many at the beginning no later token sees."""
        return n_tokens // self.group.size * self.group.size

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
        """The most blocks that a sequence of n_tokens has at once."""
        # A chunk that begins within a block holds what comes before it there as well.
        b, size = self.block_size, self.group.size
        seen = min(size + n_in_flight + b - math.gcd(size, b), n_tokens)
        return ceil_div(seen, b)


class RecurrentKind(FullKind):
    """One state stands for all tokens so far; block i is the last state within its tokens.

    A step writes the state after its last token, so the blocks that it skips stay null, and
    only a step that ends with a block leaves a state that others can resume from.
    """

    prefix_closed, slides, keeps_states = False, True, True

    def find(self, lookup: Lookup, n_max: int) -> GroupHit:
        """The longest hit of at most n_max tokens: one state at its end."""
        for n in range(n_max // self.align * self.align, 0, -self.align):
            index, inside = divmod(n - 1, self.block_size)
            whole = inside == self.block_size - 1
            if ids := (lookup.block(index) if whole else lookup.part(n)):
                return GroupHit(n_tokens=n, blocks=[lookup.nothing] * index + [ids])
        return GroupHit(n_tokens=0, blocks=[])

    def n_skipped(self, n_tokens: int) -> int:
        """Of n_tokens, how many lie before the one whose state is the last."""
        return max(0, n_tokens - 1)

    def n_new(self, n_entries: int, n_tokens: int, n_lookahead: int) -> int:
        """One block if the state comes to lie in another one; drafts get none."""
        return int(ceil_div(n_tokens, self.block_size) > n_entries)

    def grown(self, table: Sequence[int], n_tokens: int, fresh: list[int]) -> list[int]:
        """Null blocks for those that are skipped, and the one for the last state."""
        n_skipped_blocks = ceil_div(n_tokens, self.block_size) - len(table) - 1
        return [NULL] * n_skipped_blocks + fresh if fresh else []

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
        """The most blocks that a sequence of n_tokens has at once: one is read, one is written."""
        return min(2, ceil_div(n_tokens, self.block_size))

    def serves_hit(self, index: int, segment: int, marks: Collection[int]) -> bool:
        """Whether a hit can end just after block `index`."""
        end = (index + 1) * self.block_size
        return end in marks or (segment > 0 and end % segment == 0)


class SharedKind(FullKind):
    """Layers that read another group's blocks: they have none (issue 20: `kv_of`)."""

    has_blocks = False

    def n_new(self, n_entries: int, n_tokens: int, n_lookahead: int) -> int:
        """None."""
        return 0

    def n_peak(self, n_tokens: int, n_in_flight: int) -> int:
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

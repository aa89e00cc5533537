"""The blocks of one request: its tables, and what is yet to be registered or given back."""

import dataclasses
from collections.abc import Sequence

from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Hit, HitSizes
from kvrt.paged.kinds import FullKind, Moving
from kvrt.paged.layout.spec import NULL


@dataclasses.dataclass(kw_only=True)
class RequestBlocks:
    """The blocks of one request.

    Attributes:
      tables: by group, the request's block table; null where freed or never needed.
      chain: prefix hashes of its tokens; None registers nothing.
      n_tokens: tokens that there is room for, drafts left out.
      n_room: tokens that there are blocks for, None for no bound.
      first: by group, entries before it were given back.
      n_registered: by group, blocks that were registered, or never will be.
      n_next: tokens below which there is nothing to register.
      marks: ends of hits that are worth keeping beside the regular ones.
      parts: ends of hits within blocks that are yet to be registered, ascending.
      stale: (group, index) of states that lie before the end of their block for good.
      moving: what it keeps when it drops tokens; None if it never does.
      spare: by group, blocks of its own that it has no use for now; empty without `moving`, and
        until they are reserved.
      gaps: by group, cells of dropped tokens between those that stayed and those that moved down.
    """

    tables: list[list[int]]
    chain: Chain | None = None
    n_tokens: int = 0
    n_room: int | None = None
    first: list[int]
    n_registered: list[int]
    n_next: int = 0
    marks: tuple[int, ...] = ()
    parts: list[int] = dataclasses.field(default_factory=list)
    stale: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    moving: Moving | None = None
    spare: list[list[int]] = dataclasses.field(default_factory=list)
    gaps: list[int] = dataclasses.field(default_factory=list)

    def cell(self, group: int, pos: int) -> int:
        """Where a position lies in a group's table, counted in cells from its beginning."""
        moved = self.moving is not None and pos >= self.moving.n_keep
        return pos + self.gaps[group] if moved else pos

    def note_room(self, kinds: Sequence[FullKind], n_tokens: int) -> None:
        """Notes how many tokens there is room for."""
        self.n_tokens = max(self.n_tokens, n_tokens)
        gaps = self.gaps or [0] * len(kinds)
        tables = zip(self.tables, kinds, gaps, strict=True)
        self.n_room = min(
            (len(t) * kind.block_size - gap for t, kind, gap in tables if kind.has_blocks),
            default=None,
        )

    def drop(self, group: int, kind: FullKind, n: int) -> list[int]:
        """Takes n positions after those it keeps out of a table; the blocks that left it."""
        assert self.moving is not None, "it drops tokens"
        b, p0, table = kind.block_size, self.moving.n_keep, self.tables[group]
        first, end = -(-p0 // b), (p0 + self.gaps[group] + n) // b
        n_blocks = max(end - first, 0)
        gone = table[first : first + n_blocks]
        del table[first : first + n_blocks]
        self.gaps[group] += n - n_blocks * b
        # What was given back before stays given back.
        self.first[group] -= min(max(self.first[group] - first, 0), n_blocks)
        return [block for block in gone if block != NULL]


def begin_request(
    kinds: Sequence[FullKind], hit: Hit, chain: Chain | None, sizes: HitSizes, moving: Moving | None
) -> RequestBlocks:
    """A new request that begins with a hit; the same prompt later can hit up to its marks.

    Args:
      kinds: by group.
      hit: what the prefix cache has of its prompt.
      chain: prefix hashes of its prompt.
      sizes: what hits and chains are multiples of.
      moving: of a request that drops tokens.
    """
    fine, align = sizes.fine, sizes.align
    n_prompt = 0 if chain is None else len(chain.tokens)
    # The same prompt hits up to its last token, a longer one with this prefix up to its end.
    ends = (max(n_prompt - 1, 0), n_prompt)
    marks = {n // align * align for n in (*ends, *([] if moving else [hit.n_common]))}
    parts = {n // fine * fine for n in ends}
    return RequestBlocks(
        tables=[list(blocks) for blocks in hit.blocks],
        chain=chain,
        n_tokens=hit.n_tokens,
        first=[0] * len(kinds),
        n_registered=[hit.n_tokens // kind.block_size for kind in kinds],
        marks=tuple(sorted(marks - {0})),
        parts=sorted(p for p in parts if p > hit.n_tokens) if align == fine else [],
        moving=moving,
        gaps=[0] * len(kinds) if moving else [],
    )

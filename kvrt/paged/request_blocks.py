"""What a request holds."""

import dataclasses
from collections.abc import Sequence

from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Hit
from kvrt.paged.kinds import Full


@dataclasses.dataclass(kw_only=True)
class Held:
    """A request.

    Attributes:
      tables: by group, the block of each stretch of tokens; null where freed or passed over.
      chain: what its blocks hold; None registers nothing.
      n_prompt: tokens it came with.
      n_tokens: tokens that there is room for, drafts left out.
      n_room: tokens that there are blocks for, None for no bound.
      first: by group, entries before it were given back.
      n_seen: by group, blocks that were registered, or never will be.
      n_next: tokens below which there is nothing to register.
      marks: ends of hits that are worth keeping beside the regular ones.
      parts: ends of hits within blocks that are yet to be registered, ascending.
      stale: (group, index) of states that lie before the end of their block for good.
    """

    tables: list[list[int]]
    chain: Chain | None = None
    n_prompt: int = 0
    n_tokens: int = 0
    n_room: int | None = None
    first: list[int]
    n_seen: list[int]
    n_next: int = 0
    marks: tuple[int, ...] = ()
    parts: list[int] = dataclasses.field(default_factory=list)
    stale: set[tuple[int, int]] = dataclasses.field(default_factory=set)


def opened(managers: Sequence[Full], hit: Hit, chain: Chain | None, fine: int, align: int) -> Held:
    """A new request that begins with a hit; a text that comes again can hit up to its marks."""
    n_prompt = 0 if chain is None else len(chain.tokens)
    # The prompt again hits up to its last token, one that goes on from it up to its end.
    ends = (max(n_prompt - 1, 0), n_prompt)
    marks = {n // align * align for n in (*ends, hit.n_common)}
    parts = {n // fine * fine for n in ends}
    return Held(
        tables=[list(blocks) for blocks in hit.blocks],
        chain=chain,
        n_prompt=n_prompt,
        n_tokens=hit.n_tokens,
        first=[0] * len(managers),
        n_seen=[hit.n_tokens // m.block_size for m in managers],
        marks=tuple(sorted(marks - {0})),
        parts=sorted(p for p in parts if p > hit.n_tokens) if align == fine else [],
    )

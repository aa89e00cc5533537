"""The longest cached prefix of a prompt that all groups have at once.

A shorter bound can take a hit away from windows and states altogether, so groups are asked again
until none of them has less than the others.

Source: vLLM's hybrid coordinator.
"""

import dataclasses
import math
from collections.abc import Sequence

from kvrt.errors import BadConfig, UsageError
from kvrt.paged.hashing import Chain
from kvrt.paged.kinds import FullKind, GroupHit, Moving, ceil_div
from kvrt.paged.layout.spec import PagedGroup
from kvrt.paged.lookup import Findable, Lookup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """The cached prefix of a prompt; good until a block is evicted.

    Attributes:
      n_tokens: its length, less than the prompt's.
      blocks: by group, its blocks; null where no later token looks. Only a part of the last one
        belongs to it if n_tokens lies within it.
      n_common: the longest prefix that one group has.
      n_evicted: of all pools, when it was found.
      copied: the request reads keys and values in copies of its own, for it will move them.
    """

    n_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    n_common: int = 0
    n_evicted: int = 0
    copied: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """Who asks for a hit.

    Attributes:
      n_tokens: of its prompt, of which one at least is to be computed; None is those of the chain,
        which may have fewer.
      moving: of a request that will drop tokens, which needs more of windows; None of others.
    """

    n_tokens: int | None = None
    moving: Moving | None = None

    def n_most(self, chain: Chain) -> int:
        """Tokens of a chain that it may hit."""
        n = len(chain.tokens)
        return min(n, (n if self.n_tokens is None else self.n_tokens) - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HitSizes:
    """Sizes that groups share.

    Attributes:
      fine: tokens of a block of chains; it divides every group's blocks.
      align: hits are multiples of it, in tokens.
    """

    fine: int
    align: int


def hit_sizes(groups: Sequence[PagedGroup], fine: int | None, *, partial: bool) -> HitSizes:
    """The sizes of groups.

    Args:
      groups: all; those that share another's blocks count for nothing.
      fine: tokens of a block of chains; None is the most that divides all blocks.
      partial: hits may end within a block.

    Raises:
      BadConfig: fine divides not all blocks.
    """
    own = [g for g in groups if g.kind != "shared"]
    sizes = [g.block_size for g in own] or [1]
    fine = math.gcd(*sizes) if fine is None else fine
    if fine < 1 or any(size % fine for size in sizes):
        raise BadConfig(f"hash blocks of {fine} tokens; blocks of {sizes} need a common divisor")
    return HitSizes(fine=fine, align=fine if partial else math.lcm(*sizes))


class Finder:
    """Finds hits in some groups; groups of the same kind and sizes are looked up together."""

    def __init__(self, kinds: Sequence[FullKind], pools: Sequence[Findable], sizes: HitSizes):
        """For all groups, in their order."""
        same: dict[tuple, list[int]] = {}
        for i, m in enumerate(kinds):
            g = m.group
            if g.kind != "shared":
                key = type(m), g.block_size, g.size, g.n_sink, m.n_recomputed
                same.setdefault(key, []).append(i)
        sets = [(kinds[x[0]], [(i, pools[kinds[i].group.pool]) for i in x]) for x in same.values()]
        # Prefix-closed groups come first: their hit bounds the others, and is itself only cut.
        self._sets = sorted(sets, key=lambda s: not s[0].prefix_closed)
        self._n_open = sum(not m.prefix_closed for m, _ in self._sets)
        self._pools, self._sizes, self._n_groups = pools, sizes, len(kinds)

    @property
    def n_evicted(self) -> int:
        """Keys that all pools removed so far."""
        return sum(p.n_evicted for p in self._pools)

    @property
    def nothing(self) -> Hit:
        """No hit."""
        return Hit(n_tokens=0, blocks=((),) * self._n_groups, n_evicted=self.n_evicted)

    def find(self, chain: Chain, wanted: Wanted) -> Hit:
        """The longest hit of a chain.

        Raises:
          UsageError: the chain has blocks of another size.
        """
        fine = self._sizes.fine
        if chain.block_size != fine:
            raise UsageError(
                f"a chain with blocks of {chain.block_size} tokens; these groups need {fine}"
            )
        n = wanted.n_most(chain)
        if n < fine or not self._sets:
            return self.nothing
        lookups = [Lookup(chain, m.block_size // fine, members, n) for m, members in self._sets]
        found: list[GroupHit | None] = [None] * len(self._sets)
        n_common, before = 0, None
        n_passes = 0
        while n != before and (n_passes == 0 or self._n_open > 1):
            before, n_passes = n, n_passes + 1
            for i, (kind, _) in enumerate(self._sets):
                last = found[i]
                if last is None or not kind.prefix_closed:
                    last = found[i] = kind.find(lookups[i], n, wanted.moving)
                    n_common = max(n_common, last.n_tokens)
                n = min(n, last.n_tokens)
        return self._hit(n, n_common, [f for f in found if f is not None])

    def _hit(self, n: int, n_common: int, found: Sequence[GroupHit]) -> Hit:
        blocks: list[tuple[int, ...]] = [()] * self._n_groups
        for (kind, members), got in zip(self._sets, found, strict=True):
            ids_of_hit = got.blocks[: ceil_div(n, kind.block_size)]
            for i, (group, _) in enumerate(members):
                blocks[group] = tuple(ids[i] for ids in ids_of_hit)
        return Hit(n_tokens=n, blocks=tuple(blocks), n_common=n_common, n_evicted=self.n_evicted)

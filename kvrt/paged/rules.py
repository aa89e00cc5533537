"""What a block manager allows and keeps, and which groups it can have."""

import dataclasses
from collections.abc import Collection, Sequence

from kvrt.errors import BadConfig
from kvrt.paged.layout.spec import PagedGroup
from kvrt.paged.pool import BlockPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRules:
    """What a block manager allows and keeps.

    Attributes:
      n_in_flight: tokens of a step at most, drafts included.
      n_ctx: tokens of a request at most.
      caching: whether requests find what others computed.
      hash_block_size: tokens of a block of chains; None is the most that divides all blocks.
      partial: whether hits may end within a block, which is then copied.
      checkpoint_interval: of windows and states, hits that end at multiples of it are kept, in
        tokens; None is every multiple of `align`, 0 only the end of each prompt.
      marked_states: whether states are kept at marked ends alone, see `BlockManager.keep_hits`, and
        not wherever a step ended with a block.
      n_in_advance: tokens beyond those asked for that a request gets blocks for, of its own or
        where `BlockManager.has_plenty`.
      n_lookahead: drafts of a request that every allocation leaves room for.
      drafts: groups of layers that draft tokens: the last block of a hit is computed again.
    """

    n_in_flight: int
    n_ctx: int
    caching: bool = True
    hash_block_size: int | None = None
    partial: bool = False
    checkpoint_interval: int | None = None  # issue 18: context checkpoints every N tokens
    marked_states: bool = False
    n_in_advance: int = 0
    n_lookahead: int = 0  # issue 20: speculative decoding
    drafts: Collection[int] = ()  # issue 20: draft heads and LayerSkip


def check_groups(groups: Sequence[PagedGroup], pools: Sequence[BlockPool]) -> None:
    """Refuses groups without a pool, or that read what they cannot; raises BadConfig."""
    for i, g in enumerate(groups):
        if not 0 <= g.pool < len(pools):
            raise BadConfig(f"group {i} takes blocks from pool {g.pool}; there are {len(pools)}")
        if g.target is not None:
            target = groups[g.target] if 0 <= g.target < len(groups) else g
            if target.kind == "shared" or target.block_size != g.block_size:
                raise BadConfig(
                    f"group {i} reads the blocks of group {g.target}; that must be another group "
                    f"that has some of its own, of {g.block_size} tokens"
                )


def check_drafts(groups: Sequence[PagedGroup], drafts: Collection[int]) -> None:
    """Refuses groups that cannot draft; raises BadConfig."""
    if any(not 0 <= i < len(groups) or groups[i].kind not in ("full", "window") for i in drafts):
        raise BadConfig(f"groups {sorted(drafts)} draft; only full groups and windows draft")


def segment_of(groups: Sequence[PagedGroup], align: int, interval: int | None) -> int:
    """Hits that end at its multiples are kept, in tokens; 0 is none."""
    if interval is None:
        return align
    if interval < 0 or interval % align:
        raise BadConfig(
            f"checkpoint_interval is {interval} tokens; it must be a multiple of {align}, or 0"
        )
    if interval and not any(g.kind in ("window", "recurrent") for g in groups):
        raise BadConfig(
            f"checkpoint_interval is {interval} tokens without a window or a state; leave it out"
        )
    return interval

"""Room for context checkpoints in pools: blocks of windows and states beside those that are read.

A checkpoint is the run of blocks of each window, and the state, that a hit needs at its end. Its
blocks stay in their pool's queue of free blocks, found by their hashes, until somebody needs them:
so it is shared by reference, and evicted with all else that is cached.
"""

import dataclasses

from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.paged.kinds import ceil_div
from kvrt.paged.layout.groups import Grouping
from kvrt.paged.layout.spec import PagedGroup, PagedPlan

_KINDS = ("window", "chunked", "recurrent")


def n_checkpoints(grouping: Grouping, config: CacheConfig) -> int:
    """Checkpoints that pools have room for; 0 where none are asked for, or every layer keeps all.

    Raises:
      BadConfig: one takes more than the bytes that all of them may take.
    """
    one = _bytes(grouping)
    n, most = config.n_checkpoints * config.n_seq_max, config.checkpoint_bytes
    if not one or most is None:
        return n if one else 0
    check_budget(config, one)
    return min(n, most // one)


def check_budget(config: CacheConfig, one: int) -> None:
    """Refuses bytes for all checkpoints that one, of so many bytes, does not fit into."""
    most = config.checkpoint_bytes
    if most is not None and most < one:
        raise BadConfig(
            f"checkpoint_bytes is {most:,}, one checkpoint of this model takes {one:,}; raise it, "
            "or set n_checkpoints to 0"
        )


def checkpoint_bytes(grouping: Grouping, config: CacheConfig) -> int:
    """Bytes of the room for checkpoints; raises BadConfig as `n_checkpoints` does."""
    return n_checkpoints(grouping, config) * _bytes(grouping)


def with_checkpoints(plan: PagedPlan, grouping: Grouping, config: CacheConfig) -> PagedPlan:
    """A plan with room for checkpoints; raises BadConfig as `n_checkpoints` does."""
    n = n_checkpoints(grouping, config)
    pools = (
        dataclasses.replace(pool, n_blocks=pool.n_blocks + n * need)
        for pool, need in zip(plan.pools, _needs(grouping), strict=True)
    )
    return dataclasses.replace(plan, pools=tuple(pools))


def keeps_checkpoints(group: PagedGroup) -> bool:
    """Whether a group's blocks are only there where a hit may end."""
    return group.kind in _KINDS


def _needs(grouping: Grouping) -> list[int]:
    """Blocks of a checkpoint by pool."""
    needs = [0] * len(grouping.pools)
    for group in grouping.groups:
        if group.kind == "recurrent":
            needs[group.pool] += 1
        elif keeps_checkpoints(group):
            needs[group.pool] += ceil_div(group.size - 1, group.block_size)
    return needs


def _bytes(grouping: Grouping) -> int:
    """Of a checkpoint."""
    both = zip(_needs(grouping), grouping.pools, strict=True)
    return sum(n * pool.block_bytes for n, pool in both)

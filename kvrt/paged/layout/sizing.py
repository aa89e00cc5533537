"""How many blocks sequences need.

What was sized for is what is admitted. Block 0 of each pool stands
for "nothing here" and is counted in every number of blocks that is allocated.
"""

import math
from collections.abc import Callable

from kvrt.config import MAX_POS
from kvrt.errors import BadConfig
from kvrt.paged.layout.groups import Grouping
from kvrt.paged.layout.spec import PagedGroup, PagedPlan

_STATES = 2  # of a sequence: the one that is read and the one that is written


def most_blocks(group: PagedGroup, n_tokens: int, n_seq: int, n_inflight: int) -> int:
    """The most blocks of n_seq sequences that have n_tokens together, n_inflight of them new.

    A bound that holds wherever steps begin and end; exact for full groups.
    """
    b, size = group.block_size, group.size
    # Each sequence leaves up to b - 1 cells of its last block empty.
    n_seq = min(n_seq, n_tokens)
    whole = (n_tokens + n_seq * (b - 1)) // b
    if group.kind == "full":
        return whole
    if group.kind == "recurrent":
        return min(whole, _STATES * group.depth * n_seq)
    # Tokens that the oldest new one sees, and the new ones; they may begin inside a block.
    sinks = n_seq * -(-group.n_sink // b)
    if group.kind == "window":
        return min(whole, sinks + (n_seq * (size - 1 + b - 1) + n_inflight) // b + n_seq)
    if group.kind == "chunked":
        seen = size + b - math.gcd(size, b)
        return min(whole, sinks + (n_seq * (seen + b - 1) + n_inflight) // b)
    return 0


def for_tokens(grouping: Grouping, *, n_tokens: int, n_seq: int, n_inflight: int) -> PagedPlan:
    """Blocks for any n_seq sequences that have n_tokens together, however they are divided.

    Args:
      grouping: groups and pools.
      n_tokens: of all sequences together, as the cells of cell mode are.
      n_seq: sequences at once, at most.
      n_inflight: tokens that a step may add to all of them together.

    Raises:
      BadConfig: numbers below one.
    """
    _check(n_tokens=n_tokens, n_seq=n_seq, n_inflight=n_inflight)
    return grouping.plan([1 + n for n in _needs(grouping, n_tokens, n_seq, n_inflight)])


def greatest(fits: Callable[[int], bool], n_most: int = MAX_POS) -> int:
    """The greatest number up to n_most that fits, where less than what fits does; 0 if none."""
    low, high = 0, n_most
    while low < high:
        n = (low + high + 1) // 2
        low, high = (n, high) if fits(n) else (low, n - 1)
    return low


def _needs(grouping: Grouping, n_tokens: int, n_seq: int, n_inflight: int) -> list[int]:
    """Blocks by pool."""
    needs = [0] * len(grouping.pools)
    for group in grouping.groups:
        needs[group.pool] += most_blocks(group, n_tokens, n_seq, n_inflight)
    return needs


def _check(**numbers: int) -> None:
    for name, n in numbers.items():
        if n < 1:
            raise BadConfig(f"{name} is {n}; it must be at least 1")

"""How many blocks sequences need, and how many a budget of bytes gives.

One formula for both, so that what was sized for is what is admitted. Block 0 of each pool stands
for "nothing here" and is counted in every number of blocks that is allocated.
"""

import math
from collections.abc import Callable, Sequence

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
        return min(whole, _STATES * n_seq)
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


# Issue 18: an Engine whose size is given in bytes.
def for_budget(grouping: Grouping, *, n_bytes: int, n_ctx: int, n_inflight: int) -> PagedPlan:
    """Blocks that fit into n_bytes, divided so that sequences of n_ctx exhaust all pools together.

    Each pool gets blocks in proportion to what one sequence of n_ctx tokens needs of it at most;
    shorter sequences leave some of the pools of full layers, longer ones of the windowed.

    Args:
      grouping: groups and pools.
      n_bytes: of all pools, null blocks included.
      n_ctx: tokens of the sequences that the division is made for.
      n_inflight: tokens of one sequence that a step may add.

    Raises:
      BadConfig: not even one such sequence fits; the message says how long one could be.
    """
    _check(n_ctx=n_ctx, n_inflight=n_inflight)
    needs = _needs(grouping, n_ctx, 1, n_inflight)
    left = n_bytes - sum(p.block_bytes for p in grouping.pools)
    each = _bytes(grouping, needs)
    if left < each:
        most = longest(grouping, n_bytes=n_bytes, n_inflight=n_inflight)
        raise BadConfig(
            f"a sequence of {n_ctx} tokens needs {n_bytes - left + each} bytes of blocks, "
            f"{n_bytes} are given; {f'at most {most} tokens fit' if most else 'not one token fits'}"
            ", lower n_ctx or give more memory"
        )
    # No layers need no blocks; a pool always has the null block.
    return grouping.plan([1 + (n * left // each if each else 0) for n in needs])


def longest(grouping: Grouping, *, n_bytes: int, n_inflight: int) -> int:
    """The most tokens that one sequence can have in n_bytes; 0 if none."""
    left = n_bytes - sum(p.block_bytes for p in grouping.pools)
    return greatest(lambda n: _bytes(grouping, _needs(grouping, n, 1, n_inflight)) <= left)


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


def _bytes(grouping: Grouping, n_blocks: Sequence[int]) -> int:
    return sum(n * p.block_bytes for n, p in zip(n_blocks, grouping.pools, strict=True))


def _check(**numbers: int) -> None:
    for name, n in numbers.items():
        if n < 1:
            raise BadConfig(f"{name} is {n}; it must be at least 1")

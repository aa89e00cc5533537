"""What sequences need, step by step, and plans made from it: a second opinion on sizes."""

from kvrt.paged.layout.sizing import most_blocks


def blocks_in_use(group, n_settled, n_tokens):
    """Blocks of a sequence that has room for n_tokens, after its first n_settled were processed.

    What the token after those no longer sees is free; the rest of n_tokens may be in flight.
    """
    n = -(-n_tokens // group.block_size)
    if group.kind in ("recurrent", "shared"):
        return min(n, 2) if group.kind == "recurrent" else 0
    gone = 0
    if group.kind == "window":
        gone = max(0, n_settled - group.size + 1)
    elif group.kind == "chunked":
        gone = n_settled // group.size * group.size
    return n - gone // group.block_size


def for_sequences(grouping, *, n_ctx, n_seq, n_inflight):
    """Blocks for n_seq sequences of n_ctx tokens each, all at their peak at once."""
    needs = [0] * len(grouping.pools)
    for group in grouping.groups:
        needs[group.pool] += most_blocks(group, n_ctx, 1, n_inflight)
    return grouping.plan([1 + n_seq * n for n in needs])


def plan_bytes(plan):
    """Bytes of all pools."""
    return sum(p.n_blocks * p.block_bytes for p in plan.pools)


def for_budget(grouping, *, n_bytes, n_ctx, n_inflight):
    """Blocks that fit into n_bytes, so that sequences of n_ctx exhaust all pools together."""
    one = for_sequences(grouping, n_ctx=n_ctx, n_seq=1, n_inflight=n_inflight)
    needs = [p.n_blocks - 1 for p in one.pools]
    pools = list(zip(needs, grouping.pools, strict=True))
    each = sum(n * p.block_bytes for n, p in pools)
    left = n_bytes - sum(p.block_bytes for p in grouping.pools)
    return grouping.plan([1 + n * left // max(each, 1) for n, _ in pools])

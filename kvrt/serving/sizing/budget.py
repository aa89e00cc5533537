"""An engine whose size is given in bytes: how many tokens its cache then has."""

import dataclasses
from collections.abc import Callable

from kvrt.config import MAX_POS, GroupSpec, RecurrentSpec
from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.options.engine import EngineConfig
from kvrt.paged.layout.sizing import greatest, most_blocks
from kvrt.policies import Policy
from kvrt.program import estimate
from kvrt.serving.sizing.pool_sizes import engine_plan


def fit_budget(
    groups: tuple[GroupSpec, ...],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    options: EngineConfig,
    policy: Policy | None,
) -> CacheConfig:
    """The config with as many tokens as the bytes of the options have room for.

    Args:
      groups: of the model.
      recurrent: its recurrent layers.
      config: of the cache; its n_ctx counts for nothing, unless layers of any length fit.
      options: of the engine; without `budget_bytes` the config stays as it is.
      policy: of requests that name none of their own.

    Raises:
      BadConfig: no request of n_ctx_seq tokens fits; it says what one needs.
    """
    if options.budget_bytes is None:
        return config
    rules, budget = options.rules, options.budget_bytes
    assert rules is not None and rules.n_ctx_seq is not None, "the options were checked"
    n_bytes = _bytes_of(groups, recurrent, config, options, policy)
    n_ctx = greatest(lambda n: n_bytes(n) <= budget)
    # Cells of tokens that a policy dropped are in two blocks more.
    n_least = rules.n_ctx_seq + (2 * (options.page(config) or config.block_size) if policy else 0)
    if n_ctx < n_least:
        raise BadConfig(
            f"{budget} bytes have no room for one request of {rules.n_ctx_seq} "
            f"tokens, which needs {n_bytes(n_least)}; give so many, lower n_ctx_seq or n_seq_max, "
            "or use a smaller KV dtype"
        )
    if n_ctx == MAX_POS:  # whatever is used again takes the same for any length
        n_ctx = max(config.n_ctx, rules.n_ctx_seq * config.n_seq_max)
    return dataclasses.replace(config, n_ctx=n_ctx)


def budget_line(
    groups: tuple[GroupSpec, ...],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    options: EngineConfig,
    policy: Policy | None,
) -> str:
    """What a budget became: tokens, blocks, and requests of n_ctx_seq tokens at once."""
    rules = options.rules
    assert rules is not None and rules.n_ctx_seq is not None, "the options were checked"
    n_bytes = _bytes_of(groups, recurrent, config, options, policy)(config.n_ctx)
    n_most, n_blocks = config.n_ctx // rules.n_ctx_seq, ""
    plan = engine_plan(groups, recurrent, config, options, policy)
    sizes = [most_blocks(g, rules.n_ctx_seq, 1, rules.n_batch) for g in plan.groups]
    for i, pool in enumerate(plan.pools):
        need = sum(n for n, g in zip(sizes, plan.groups, strict=True) if g.pool == i)
        n_most = min(n_most, (pool.n_blocks - 1) // need)
    if options.mode == "paged":
        each = " and ".join(f"{pool.n_blocks - 1:,}" for pool in plan.pools)
        n_blocks = f" in {each} blocks of {config.block_size}"
    n_requests = min(n_most, config.n_seq_max)
    return (
        f"{config.n_ctx:,} tokens{n_blocks}, {n_requests:,} "
        f"request{'s' if n_requests > 1 else ''} of {rules.n_ctx_seq:,} at once, {n_bytes:,} bytes"
    )


def _bytes_of(
    groups: tuple[GroupSpec, ...],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    options: EngineConfig,
    policy: Policy | None,
) -> Callable[[int], int]:
    """From tokens to the bytes of such a cache, and of what the host has beside it."""
    n_host = options.tiers.host_bytes if options.tiers else 0

    def n_bytes(n_ctx: int) -> int:
        sized = dataclasses.replace(config, n_ctx=n_ctx)
        plan = engine_plan(groups, recurrent, sized, options, policy)
        tails = estimate.paged_tail_bytes(groups, plan, sized, options.fine(config))
        return n_host + estimate.plan_bytes(plan, sized) + tails

    return n_bytes

"""How many blocks the pools of an engine have."""

import dataclasses

from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.options.cache import CacheConfig
from kvrt.options.engine import EngineConfig
from kvrt.paged.kinds import kind_of
from kvrt.paged.layout.checkpoints import with_checkpoints
from kvrt.paged.layout.groups import group_layers, layer_caches
from kvrt.paged.layout.sizing import for_tokens, most_blocks
from kvrt.paged.layout.spec import PagedPlan
from kvrt.policies import DropSchedule, Policy


def engine_plan(
    groups: tuple[GroupSpec, ...],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    options: EngineConfig,
    policy: Policy | None,
) -> PagedPlan:
    """Groups, and pools with room for n_ctx tokens of n_seq_max sequences together.

    Of windows there is what requests with the engine's policy take of them, too. `options` have
    rules.
    """
    rules = options.rules
    assert rules is not None, "an engine has rules"
    grouping = group_layers(layer_caches(groups, recurrent, config, options.page(config)))
    plan = for_tokens(
        grouping,
        n_tokens=config.n_ctx,
        n_seq=config.n_seq_max,
        n_inflight=rules.n_batch,
    )
    plan = with_checkpoints(plan, grouping, config)
    if options.fine(config) is not None and config.n_seq_max == 1:
        plan = _with_a_copied_state(plan)
    if policy is None:
        return plan
    n_ctx = min(rules.n_ctx_seq or config.n_ctx, config.n_ctx)
    context = DropSchedule(policy=policy, n_ctx=n_ctx, n_step=config.n_ubatch)
    if context.n_least < 1:  # refused later on, with all else that is wrong with it
        return plan
    moving = context.endless()
    n_seq = min(config.n_seq_max, max(config.n_ctx // context.n_most, 1))
    n_more = [0] * len(plan.pools)
    for group in plan.groups:
        if (kind := kind_of(group, group.block_size)).slides and not kind.keeps_states:
            n = most_blocks(group, config.n_ctx, config.n_seq_max, rules.n_batch)
            n_more[group.pool] += max(n_seq * kind.n_reserved(moving, rules.n_batch) - n, 0)
    pools = (
        dataclasses.replace(pool, n_blocks=pool.n_blocks + n)
        for pool, n in zip(plan.pools, n_more, strict=True)
    )
    return dataclasses.replace(plan, pools=tuple(pools))


def _with_a_copied_state(plan: PagedPlan) -> PagedPlan:
    """One state more: a hit that ends within a block copies one, beside that read and written.

    Of several sequences the others have it.
    """
    (pool,) = {g.pool for g in plan.groups if g.kind == "recurrent"} or {None}
    pools = (
        dataclasses.replace(x, n_blocks=x.n_blocks + 1) if i == pool else x
        for i, x in enumerate(plan.pools)
    )
    return dataclasses.replace(plan, pools=tuple(pools))

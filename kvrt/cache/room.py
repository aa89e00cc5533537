"""Room for new tokens: whether they fit, what the policy evicts for them, and who is refused."""

from collections.abc import Mapping

import numpy as np

from kvrt.cache import checks
from kvrt.cache.cell_cache import CellCache
from kvrt.cache.stats import DropEvent
from kvrt.cellcache import contents
from kvrt.cellcache import group as groups
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.room import RoomPlan, plan_room
from kvrt.cells import check_seq_id, n_shared, n_used, owned
from kvrt.errors import CacheFull
from kvrt.policies import Policy, PolicyContext, policy_name
from kvrt.policies.context import n_at_once


def n_fit(cache: CellCache, seq_id: int) -> int:
    """Tokens that a sequence may take in before something has to be evicted."""
    if cache.policy is None:
        return cache.host.n_fit(seq_id)
    return cache.policy.n_fit(cache.host.n_free, cache.host.pos_max(seq_id) + 1)


def check_free(cache: CellCache, n: int, n_free: int) -> None:
    """Refuses n tokens where only n_free cells are empty; raises CacheFull."""
    checks.free_cells(n, n_free, cache.config.n_ctx, shifts=cache.policy is not None)


def check_end(cache: CellCache, seq_id: int, end: int) -> None:
    """Refuses tokens up to `end` for which a policy would evict others.

    Raises:
      CacheFull: they are behind the end of the sequence, and there is no room.
    """
    n_past = cache.host.pos_max(seq_id) + 1
    if cache.policy and end > n_past and n_fit(cache, seq_id) < end - n_past:
        raise CacheFull(
            f"positions up to {end} of sequence {seq_id} do not fit: it ends at {n_past} and "
            f"{type(cache.policy).__name__} lets {max(n_fit(cache, seq_id), 0)} more tokens in "
            "before some have to go; append them"
        )


def n_part(cache: CellCache, policy: Policy, seq_id: int, n: int) -> int:
    """Tokens of n to make room for at once: all, or a step's where more come in than can stay.

    Raises:
      CacheFull: cells that other sequences share could get in the way of a part.
    """
    if n <= n_fit(cache, seq_id):
        return n
    cells, n_free, n_step = cache.host.cells, cache.host.n_free, cache.config.n_ubatch
    n_own = int(np.count_nonzero(owned(cells, seq_id)))
    n_least = PolicyContext(policy=policy, n_ctx=n_free + n_own, n_step=n_step).n_least
    if n <= n_least or n_least < 1:
        return n
    if n_shared(cells, seq_id, 0):
        check_free(cache, n, n_free)
    return min(n_least, n_step)


def make_room(cache: CellCache, wanted: Mapping[int, int]) -> None:
    """Makes room for so many tokens of each sequence at once, by the policy if there is one.

    Raises:
      CacheFull: they do not all fit; nothing was evicted.
    """
    for s, n in wanted.items():
        check_seq_id(s, cache.config.n_seq_max)
        checks.last_pos(cache.host.pos_max(s) + 1 + n)
    plans = _plan(cache, cache.policy, wanted) if cache.policy is not None else []
    _check_fit(cache, plans[-1][1].contents if plans else None, wanted)
    if plans:
        _evict(cache, plans)


def _check_fit(cache: CellCache, after: CacheContents | None, wanted: Mapping[int, int]) -> None:
    """Refuses tokens that do not fit, `after` evictions if any are due; raises CacheFull."""
    host = cache.host
    if host.blocks is not None and any(map(cache.in_blocks, wanted)):
        seq_ids = np.repeat(np.array(list(wanted), np.int32), list(wanted.values()))
        host.plan_copy_on_write(seq_ids, {s: host.pos_max(s) + 1 for s in wanted})
    else:
        n_new, rounds = sum(wanted.values()), cache.self_extend
        if rounds:
            n_new += sum(rounds.n_copies(host.cells, s, n) for s, n in wanted.items())
        check_free(cache, n_new, contents.n_tokens_free(after) if after else host.n_free)
    if host.rolls:
        _check_windows(cache, after or host.contents, wanted)


def _evict(cache: CellCache, plans: list[tuple[int, RoomPlan]]) -> None:
    """Evicts as planned."""
    assert cache.policy is not None, "without a policy nothing is planned"
    name = policy_name(cache.policy)
    for _, plan in plans:
        for copies in plan.copies:
            cache.copy_cells(copies)
    cache.commit(plans[-1][1].contents, "changed")
    for s, plan in plans:
        cache.logits.shifted(s, -sum(drop.n for drop, _ in plan.drops))
        cache.counts.drops += [
            DropEvent(seq_id=s, n_past=n_past, n_dropped=drop.n, policy=name)
            for drop, n_past in plan.drops
        ]


def _plan(
    cache: CellCache, policy: Policy, wanted: Mapping[int, int]
) -> list[tuple[int, RoomPlan]]:
    """The drops of each sequence that has to drop something; each plan follows from the last.

    The longest sequence is asked first: where cells are short it has the most to evict.
    """
    plans: list[tuple[int, RoomPlan]] = []
    host, again = cache.host, cache.config.requantizes
    after, n_free, n_promised = host.contents, host.n_free, 0
    for s in sorted(wanted, key=host.pos_max, reverse=True):
        n_past = host.pos_max(s) + 1
        if policy.n_fit(n_free - n_promised, n_past) < wanted[s]:
            n = max(wanted[s], n_at_once(n_past - policy.n_keep, requantizes=again))
            plan = plan_room(after, s, n, policy, n_promised=n_promised)
            if plan.drops:
                plans.append((s, plan))
                after, n_free = plan.contents, contents.n_tokens_free(plan.contents)
        n_promised += wanted[s]
    return plans


def _check_windows(cache: CellCache, after: CacheContents, wanted: Mapping[int, int]) -> None:
    """Refuses tokens that groups which use cells again could not take in; raises CacheFull."""
    for group in (g for g in after.groups if g.rolls):
        if len(wanted) == 1:
            ((s, n),) = wanted.items()
            groups.check_room(group, s, n, cache.config.n_ubatch)
        else:
            first = {s: groups.n_past(group, s) for s in wanted}
            groups.find(group, sum(wanted.values()), first, int(n_used(group.cells)))

"""What is due before tokens come in: drops that make room, rounds of SelfExtend, refusals."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.cache import checks
from kvrt.cache.cell_cache import CellCache
from kvrt.cache.stats import DropEvent
from kvrt.cellcache import contents
from kvrt.cellcache import group as groups
from kvrt.cellcache.blocks import CellCopies
from kvrt.cellcache.contents import CacheContents
from kvrt.cells import check_seq_id, n_shared, n_used, owned
from kvrt.errors import CacheFull
from kvrt.policies import Drop, DropSchedule, Policy, SeqCounts, policy_name
from kvrt.policies.schedule import drop_edits
from kvrt.policies.self_extend import ExtendSchedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropPlan:
    """Planned drops of sequences, to be committed in this order, or none of them.

    Attributes:
      contents: the contents after all drops, the K-shift of moved cells pending.
      drops: of each its sequence, the length of that before, and the positions removed.
      copies: for each edit and group the cells to copy first, because another sequence shares them.
    """

    contents: CacheContents
    drops: tuple[tuple[int, int, Drop], ...] = ()
    copies: tuple[tuple[CellCopies, ...], ...] = ()


def n_fit(cache: CellCache, seq_id: int) -> int:
    """Tokens that a sequence may take in before something has to be evicted."""
    if cache.policy is None:
        return cache.host.n_fit(seq_id)
    return cache.policy.n_fit(cache.host.n_free, cache.host.pos_max(seq_id) + 1)


def n_ahead(cache: CellCache, seq_id: int) -> int:
    """Tokens that a sequence can take in before something moves, after room for one was made."""
    make_room(cache, {seq_id: 1})
    n_until = extend(cache, seq_id)
    n = max(n_fit(cache, seq_id), 1)
    return n if n_until is None else min(n, n_until)


def n_part(cache: CellCache, seq_id: int, n: int) -> int:
    """Tokens of n to make room for at once: all, or a step's where more come in than can stay.

    Raises:
      CacheFull: cells that other sequences share could get in the way of a part.
    """
    if cache.policy is None or n <= n_fit(cache, seq_id):
        return n
    cells, n_free = cache.host.cells, cache.host.n_free
    n_own = int(np.count_nonzero(owned(cells, seq_id)))
    n_least = _schedule(cache, cache.policy, n_free + n_own).n_least
    if n <= n_least or n_least < 1:
        return n
    if n_shared(cells, seq_id, 0):
        check_free(cache, n, n_free)
    return min(n_least, cache.config.n_ubatch)


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


def make_room(cache: CellCache, wanted: Mapping[int, int]) -> None:
    """Makes room for so many tokens of each sequence at once, by the policy if there is one.

    Raises:
      CacheFull: they do not all fit; nothing was evicted.
    """
    for s, n in wanted.items():
        check_seq_id(s, cache.config.n_seq_max)
        checks.last_pos(cache.host.pos_max(s) + 1 + n)
    plan = None if cache.policy is None else _plan(cache, cache.policy, wanted)
    _check_fit(cache, plan, wanted)
    if plan is not None and cache.policy is not None:
        name = policy_name(cache.policy)
        cache.edited(plan.contents, plan.copies)
        for s, n_past, drop in plan.drops:
            cache.logits.shifted(s, -drop.n)
            event = DropEvent(seq_id=s, n_past=n_past, n_dropped=drop.n, policy=name)
            cache.counts.drops.append(event)


def _plan(cache: CellCache, policy: Policy, wanted: Mapping[int, int]) -> DropPlan | None:
    """Drops of all sequences that have to drop something; None of none.

    The longest sequence is asked first: where cells are short it has the most to evict.
    """
    host, plan = cache.host, DropPlan(contents=cache.host.contents)
    n_free, n_promised = host.n_free, 0
    for s in sorted(wanted, key=host.pos_max, reverse=True):
        n_past, n = host.pos_max(s) + 1, wanted[s]
        if policy.n_fit(n_free - n_promised, n_past) < n:
            schedule = _schedule(cache, policy, cache.config.n_ctx)
            counts = SeqCounts(s, n_past + n, n_past, n_new=n)
            plan = plan_drops(plan, schedule, counts, n_promised)
            n_free = contents.n_tokens_free(plan.contents)
        n_promised += n
    return plan if plan.drops else None


def plan_drops(
    plan: DropPlan, schedule: DropSchedule, counts: SeqCounts, n_promised: int = 0
) -> DropPlan:
    """Plans drops of one sequence more, or as far as they free cells.

    Args:
      plan: unchanged.
      schedule: what is due by counts, as if the sequence shared no cell.
      counts: of the sequence, with the tokens to make room for at once.
      n_promised: empty cells that other sequences will take in the same step.

    Raises:
      CacheFull: moving shared cells needs more empty cells than there are, or leaves fewer than
        the new tokens need where the policy would have them dropped whatever is empty.
      CannotRewind: a windowed group would lack what it has dropped.
    """
    policy, n_free = schedule.policy, contents.n_tokens_free(plan.contents) - n_promised
    while drops := schedule.due(counts._replace(n_free=n_free)).drops:
        for drop in drops:
            s, n_past = counts.seq_id, counts.n_past
            after, copies = contents.edited(plan.contents, s, drop_edits(s, drop))
            n_after = contents.n_tokens_free(after) - n_promised
            if policy.n_fit(n_after, n_past - drop.n) <= policy.n_fit(n_free, n_past):
                _check_own_limit(policy, counts, copies)
                return plan
            dropped = (*plan.drops, (s, n_past, drop))
            plan = DropPlan(contents=after, drops=dropped, copies=(*plan.copies, *copies))
            counts, n_free = counts._replace(n_gone=counts.n_gone + drop.n), n_after
    return plan


def extend(cache: CellCache, seq_id: int) -> int | None:
    """Applies the rounds of SelfExtend that are due before the next step of a sequence.

    Returns:
      Tokens that it may take in before another one is due; None without SelfExtend.
    """
    schedule = cache.extend
    if schedule is None:
        return None
    counts = _extend_counts(cache, schedule, seq_id)
    due = schedule.due(counts)
    if due.edits:
        cache.edited(*contents.edited(cache.host.contents, seq_id, due.edits))
        cache.counts.n_extend += len(due.divided)
    # Known from here on, also of a sequence that was cut short and grows again.
    cache.reached[seq_id] = schedule.ga_i(counts.n_gone + due.n_gone)
    return due.n_until - counts.n_computed


def _schedule(cache: CellCache, policy: Policy, n_ctx: int) -> DropSchedule:
    n_step, again = cache.config.n_ubatch, cache.config.requantizes
    return DropSchedule(policy=policy, n_ctx=n_ctx, n_step=n_step, requantizes=again)


def _extend_counts(cache: CellCache, schedule: ExtendSchedule, seq_id: int) -> SeqCounts:
    """Counts of a sequence; one that was cut short continues from the group where it ends."""
    n_past = cache.host.pos_max(seq_id) + 1
    end = -(-n_past // schedule.group) * schedule.group
    n_gone = schedule.n_gone(min(cache.reached.get(seq_id, 0), end))
    return SeqCounts(seq_id, 0, n_past + n_gone, n_gone)


def _check_fit(cache: CellCache, plan: DropPlan | None, wanted: Mapping[int, int]) -> None:
    """Refuses tokens that do not fit after the planned drops; raises CacheFull."""
    host = cache.host
    if host.blocks is not None and any(map(cache.in_blocks, wanted)):
        seq_ids = np.repeat(np.array(list(wanted), np.int32), list(wanted.values()))
        host.plan_copy_on_write(seq_ids, {s: host.pos_max(s) + 1 for s in wanted})
    else:
        n_new = sum(wanted.values())
        if cache.extend:
            n_new += sum(_n_copies(cache, cache.extend, s, n) for s, n in wanted.items())
        n_free = contents.n_tokens_free(plan.contents) if plan else host.n_free
        check_free(cache, n_new, n_free)
    if host.rolls:
        _check_windows(cache, plan.contents if plan else host.contents, wanted)


def _n_copies(cache: CellCache, schedule: ExtendSchedule, seq_id: int, n: int) -> int:
    """Cells that rounds of SelfExtend may take for copies of shared ones while n tokens come in."""
    counts = _extend_counts(cache, schedule, seq_id)
    due = schedule.due(counts)
    if not due.edits and due.n_until - counts.n_computed >= n:
        return 0
    return int(n_shared(cache.host.cells, seq_id, schedule.ga_i(counts.n_gone)))


def _check_windows(cache: CellCache, after: CacheContents, wanted: Mapping[int, int]) -> None:
    """Refuses tokens that groups which use cells again could not take in; raises CacheFull."""
    for group in (g for g in after.groups if g.rolls):
        if len(wanted) == 1:
            ((s, n),) = wanted.items()
            groups.check_room(group, s, n, cache.config.n_ubatch)
        else:
            first = {s: groups.n_past(group, s) for s in wanted}
            groups.find(group, sum(wanted.values()), first, int(n_used(group.cells)))


def _check_own_limit(
    policy: Policy, counts: SeqCounts, copies: tuple[tuple[CellCopies, ...], ...]
) -> None:
    """Refuses tokens beyond what a policy keeps, where a drop would take more cells than it frees.

    Raises:
      CacheFull: they are; without that limit the cells decide.
    """
    n_past, n_new = counts.n_past, counts.n_new or 1
    n_most = policy.n_fit(2**31 - 1, n_past)
    if n_most < n_new:
        n_copied = sum(max((len(src) for src, _ in some), default=0) for some in copies)
        raise CacheFull(
            f"a sequence of {n_past} tokens may get {max(n_most, 0)} more and {n_new} are wanted; "
            f"a drop would copy {n_copied} cells that other sequences share, and leave too few "
            "empty ones; raise n_ctx, or remove those sequences"
        )

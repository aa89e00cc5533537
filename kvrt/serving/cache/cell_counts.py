"""What a cache in cells counts: tokens of a sample, and how full its groups are."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache.indexed_group import IndexedGroup
from kvrt.cells import owned
from kvrt.serving.cache.prefixes import CellPrefixes
from kvrt.serving.metrics import PoolUse
from kvrt.serving.request import SeqState


def n_each(state: SeqState) -> int:
    """Cells of each of the samples that are to be forked from one, beside those that it shares."""
    return state.n_whole - (0 if state.moves else state.n_prompt)


def n_findable(state: SeqState) -> int:
    """Tokens of a sample that others may find: none of one that SelfExtend will move."""
    return state.n_unmoved if state.extend is None else 0


def findable(state: SeqState) -> Int32[np.ndarray, " n"]:
    """Tokens of a sample that a hit may have: what it never drops or moves, and not the last."""
    n = min(state.n_unmoved, len(state.tokens) - 1)
    if state.context is not None:
        # The first token after a hit is computed before anything is dropped.
        n = min(n, state.context.n_part(state.n_prompt) - 1)
    return ids_of(state, 0, n)


def ids_of(state: SeqState, start: int, end: int) -> Int32[np.ndarray, " n"]:
    """Tokens [start, end) of a sample."""
    n = state.n_prompt
    prompt = np.frombuffer(state.request.text, ">u4")[start:end].astype(np.int32)
    if end <= n:
        return prompt
    return np.concatenate([prompt, np.array(state.tokens[max(start, n) : end], np.int32)])


def n_taken(
    group: IndexedGroup, seq_id: int, n_shared: int, others: Mapping[int | None, int]
) -> int:
    """Cells of a sample with a context that were promised to it, or that nobody paid for.

    Its share of a hit, n_shared; and what it took and none of the others of the kind has as well,
    of which there is the share of each.
    """
    mine = owned(group.cells, seq_id) & (group.cells.pos >= n_shared)
    for other, n in others.items():
        assert other is not None, "those that have a context run"
        mine &= ~(owned(group.cells, other) & (group.cells.pos >= n))
    return n_shared + int(np.count_nonzero(mine))


def pool_use(groups: Sequence[IndexedGroup], prefixes: CellPrefixes | None) -> list[PoolUse]:
    """How full each group is; kept prefixes are free, but for those that are pinned."""
    out = []
    for i, group in enumerate(groups):
        n, n_idle = group.extent.n_cells, prefixes.count_idle(group) if prefixes else 0
        use = PoolUse(
            n_units=n,
            n_free=n - group.n_used + n_idle,
            n_cached=n_idle,
            n_evicted=prefixes.n_evicted[i] if prefixes else 0,
            n_pinned=int(np.count_nonzero(prefixes.pinned.cells(group))) if prefixes else 0,
        )
        out.append(use)
    return out

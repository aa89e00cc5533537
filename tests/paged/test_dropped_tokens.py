"""Tokens that a policy drops from blocks: later ones keep their cells, and no block is lost."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from paged_cases import Cache, full, text, window

from kvrt.errors import UsageError
from kvrt.paged.layout.spec import NULL
from kvrt.paged.tables import BlockTables

N_MOST = 40  # tokens that the request has at once


@given(
    p0=st.integers(0, 17),
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=2),
    drops=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=20),
)
def test_later_tokens_stay_in_their_cells(p0, sizes, drops):
    """Against a list of cells a group, from which dropped ones are deleted."""
    groups = [full(b) for b in sizes]
    room = max(-p0 % b + b - 1 for b in sizes)
    cache = Cache(groups, 600)
    cache.paged.allocate("a", N_MOST + room)
    at_first = [sorted(cache.paged.table("a", g)) for g in range(len(groups))]
    tables = [BlockTables(group, 2, 64) for group in groups]
    for g, table in enumerate(tables):
        table.put(1, cache.paged.table("a", g))

    def slots(g, p, n):
        return tables[g].slots(np.full(n, 1, np.int32), np.arange(p, p + n, dtype=np.int32))

    held = [slots(g, 0, p0 + 1).tolist() for g in range(len(groups))]
    for n, more in drops:
        for g, cells in enumerate(held):
            new = slots(g, len(cells), min(more, N_MOST - len(cells))).tolist()
            assert not set(new) & set(cells)
            cells += new
        n_now = min(n, len(held[0]) - p0)
        cache.paged.drop("a", p0, n_now)
        for g, cells in enumerate(held):
            del cells[p0 : p0 + n_now]
            gap = cache.paged.gap("a", g)
            assert 0 <= gap < 2 * sizes[g]
            tables[g].drop(1, cache.paged.table("a", g), p0, gap)
            assert slots(g, 0, len(cells)).tolist() == cells
            read = set(tables[g].block_list(1, len(cells)).tolist())
            assert {cell // sizes[g] for cell in cells} <= read
            assert sorted(cache.paged.table("a", g)) == at_first[g]
            # All that may still come has its room.
            assert NULL not in tables[g].block_list(1, N_MOST)
            assert len(tables[g].block_list(1, N_MOST)) * sizes[g] >= N_MOST + gap
    cache.paged.free("a")
    assert cache.pool.n_free == 599


def test_windows_refuse_drops():
    cache = Cache([full(4), window(8, b=4)], 64)
    cache.start("a", text(20))
    with pytest.raises(UsageError, match="tokens can be dropped from full groups alone"):
        cache.paged.drop("a", 2, 5)

"""Block lists of tables in arrays of larger blocks: each block once, whatever slid out or came."""

import numpy as np
import pytest

from kvrt.paged.layout.spec import NULL, PagedGroup
from kvrt.paged.tables import BlockTables


@pytest.mark.parametrize("kind", ["window", "full"])
def test_a_list_has_the_blocks_of_its_table_once(kind):
    sizes = {"size": 8, "n_sink": 3} if kind == "window" else {}
    group = PagedGroup(kind=kind, layers=(0,), block_size=1, array_block=4, **sizes)
    n_head, n_seen = (3, 7) if kind == "window" else (0, 64)
    tables, rng, table = BlockTables(group, 2, 64, n_array_blocks=20), np.random.default_rng(0), []
    free = rng.permutation(np.arange(1, 77)).tolist()
    for _ in range(30):
        table += [free.pop() for _ in range(int(rng.integers(1, 3)))]
        if kind == "window":  # of 8 blocks behind 3 that stay
            table[3 : max(len(table) - 8, 3)] = [NULL] * max(len(table) - 11, 0)
        tables.put(0, table, min(n_head, len(table)))
        # Another sequence begins with what is left of the first one, as a fork does.
        tables.clear(1)
        tables.put(1, table, min(n_head, len(table)))
        seen = table[:n_head] + table[max(len(table) - n_seen, n_head) :]
        wanted = {(block - 1) // 4 for block in seen if block != NULL}
        lists, n_blocks = tables.read(
            np.arange(2, dtype=np.int32), np.full(2, len(table), np.int32), 2
        )
        for ids, n in zip(lists, n_blocks, strict=True):
            assert sorted(ids[:n].tolist()) == sorted(wanted)
        tables.shrink(0, len(table))
        if len(free) < 4:
            break
    assert len(table) > 30

"""Which blocks of a step's lists are read once for several: any tree, and the rule of the cost."""

import numpy as np
import pytest

from kvrt.cells.slots import SeqBlocks, SharedBlocks
from kvrt.serving.reading.cost import ReadCost, choose_runs
from kvrt.serving.reading.runs import find_runs
from kvrt.serving.reading.shared_reads import read_apart

N_ENTRIES, N_RUNS = 40, 5


def tree_of(rng, n_seqs):
    """Lists of a random tree: two share what they begin with, all other blocks are their own."""
    free, lists = iter(rng.permutation(400).tolist()), [[]]
    while len(lists) < n_seqs:
        parent = lists[rng.integers(len(lists))]
        stem = parent[: rng.integers(len(parent) + 1)]
        lists.append([*stem, *(next(free) for _ in range(rng.integers(0, 5)))])
    return lists


def arrays(lists):
    """Tables that nobody may write to; what is not read is a block as any other."""
    tables = np.full((len(lists), N_ENTRIES), 7, np.int32)
    for row, x in zip(tables, lists, strict=True):
        row[: len(x)] = x
    n_blocks = np.array([len(x) for x in lists], np.int32)
    for x in (tables, n_blocks):
        x.setflags(write=False)
    return tables, n_blocks


def read_by(found, n):
    """All that is read for each of n sequences, in no order."""
    shared = found.shared
    out = [found.tables[i, : found.n_blocks[i]].tolist() for i in range(n)]
    for ids, size, members in zip(shared.tables, shared.n_blocks, shared.members, strict=True):
        for s in members[members < n]:
            out[s] += ids[:size].tolist()
    return [sorted(x) for x in out]


@pytest.mark.parametrize("seed", range(20))
def test_every_block_of_a_list_is_read_once_for_it(seed):
    rng, n_taken = np.random.default_rng(seed), 0
    for n in rng.integers(1, 9, 10).tolist():
        lists = tree_of(rng, n)
        tables, n_blocks = arrays(lists)
        runs = find_runs(tables, n_blocks)
        for r in runs:
            mine = [lists[s] for s in r.members]
            assert len({tuple(x[: r.end]) for x in mine}) == 1 < len(mine)
            assert len({tuple(x[: r.end + 1]) for x in mine}) > 1 or len(mine[0]) == r.end
            n_alike = sum(x[: r.start + 1] == mine[0][: r.start + 1] for x in lists)
            assert n_alike == len(mine), "a list that begins alike was left out"
        cost = ReadCost(n_lists=n, n_side=1, widths=(2, 4, 8), most=N_RUNS)
        taken = choose_runs(runs, n_blocks, cost)
        n_taken += len(taken)
        found = read_apart(SeqBlocks(tables=tables, n_blocks=n_blocks), taken, nothing(n))
        assert read_by(found, n) == [sorted(x) for x in lists]
        spent = cost.of_lists(int(found.n_blocks.max())) + sum(map(cost.of_run, taken))
        assert spent <= cost.of_lists(int(n_blocks.max()))
    assert n_taken


def nothing(n):
    return SharedBlocks(
        tables=np.zeros((N_RUNS, N_ENTRIES), np.int32),
        n_blocks=np.zeros(N_RUNS, np.int32),
        members=np.full((N_RUNS, n), n, np.int32),
    )


def eight(*stems, own=1):
    """Eight lists, each of one of some stems in turn and blocks of its own."""
    return [[*stems[i % len(stems)], *range(100 + 9 * i, 100 + 9 * i + own)] for i in range(8)]


SYSTEM, A, B = range(12), range(20, 32), range(40, 52)
CASES = {
    "all share": (eight(SYSTEM), [(0, 12)]),
    "two of four each": (eight(A, B), [(0, 12), (0, 12)]),
    "two levels": (eight([*SYSTEM, *A], [*SYSTEM, *B]), [(0, 12), (12, 24), (12, 24)]),
    "half share more": (eight([*SYSTEM, *A], SYSTEM), [(0, 12), (12, 24)]),
    "a short stranger": ([*eight(SYSTEM)[1:], [60, 61]], [(0, 12)]),
    # The loop over lists ends with the longest one, whatever the others read.
    "a long stranger": ([*eight(SYSTEM)[1:], [*range(60, 73)]], []),
    "a block of many": (eight([0], own=9)[:2], []),
    "nobody": (eight([], own=9), []),
    "one": (eight(SYSTEM)[:1], []),
}


@pytest.mark.parametrize("name", CASES)
def test_runs_are_read_once_where_that_costs_less(name):
    lists, wanted = CASES[name]
    tables, n_blocks = arrays(lists)
    cost = ReadCost(n_lists=8, n_side=4, widths=(4, 8), most=N_RUNS)
    found = choose_runs(find_runs(tables, n_blocks), n_blocks, cost)
    assert sorted((r.start, r.end) for r in found) == wanted

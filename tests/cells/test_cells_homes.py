"""Home blocks: slots are those of the plain rule, no cell is lost, sequences lie together."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from plainhomes import Homes

from kvrt import cells as kc
from kvrt.cells.homes import n_blocks_wanted, no_homes, plan_home_slots
from kvrt.errors import CacheFull

N_SEQ = 6
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, N_SEQ - 1), st.integers(1, 9)), max_size=N_SEQ),
        st.one_of(st.none(), st.integers(0, N_SEQ - 1)),
    ),
    max_size=25,
)


class Cache:
    """Cells with homes, as an engine uses them."""

    def __init__(self, n_cells, size):
        self.cells, self.ends, self.size = kc.create(n_cells, N_SEQ), no_homes(N_SEQ), size

    def find(self, seq_ids):
        def blocks_of(seq_id):
            return kc.blocks_of(self.cells, [seq_id], self.size)

        return plan_home_slots(self.cells, self.ends, seq_ids, self.size, blocks_of)

    def place(self, tokens):
        seq_ids = np.repeat(*np.array(tokens, np.int32).reshape(-1, 2).T)
        slots = self.find(seq_ids)
        pos = [np.arange(n) + self.n(s) for s, n in tokens]
        pos = np.concatenate([np.zeros(0, np.int32), *pos]).astype(np.int32)
        self.cells = kc.place(self.cells, slots, pos, seq_ids)
        self.ends[seq_ids] = slots + 1
        return slots.tolist()

    def n(self, seq_id):
        return int(np.count_nonzero(kc.owned(self.cells, seq_id)))

    def end(self, seq_id):
        self.cells = kc.seq_rm(self.cells, seq_id, 0, None)
        self.ends[seq_id] = -1


@pytest.mark.slow
@given(n_cells=st.integers(8, 60), size=st.sampled_from([1, 4, 8]), steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_slots_are_those_of_the_plain_rule_until_no_cell_is_empty(n_cells, size, steps):
    cache, plain = Cache(n_cells, size), Homes(n_cells, size)
    for asked, ended in steps:
        tokens = list(dict(asked).items())
        n_empty = int(kc.n_free(cache.cells))
        if sum(n for _, n in tokens) > n_empty:
            before = cache.cells, cache.ends.copy()
            with pytest.raises(CacheFull, match=f"{n_empty} of {n_cells} are empty"):
                cache.place(tokens)
            assert before[0] is cache.cells and np.array_equal(before[1], cache.ends)
            # What there is can be had to the last cell.
            tokens = [(tokens[0][0], n_empty)] if n_empty else []
        wanted = plain.place(tokens)
        assert cache.place(tokens) == wanted and len(set(wanted)) == len(wanted)
        owners = [{s for s in range(N_SEQ) if x >> s & 1} for x in cache.cells.seqs[:, 0].tolist()]
        assert owners == plain.cells
        if ended is not None:
            cache.end(ended)
            plain.end(ended)


@given(
    growth=st.lists(st.lists(st.integers(0, 5), min_size=N_SEQ, max_size=N_SEQ), max_size=30),
    size=st.sampled_from([4, 16]),
)
@settings(max_examples=60, deadline=None)
def test_a_sequence_that_finds_empty_blocks_has_as_few_as_can_be(growth, size):
    cache = Cache(N_SEQ * 160, size)
    for step in growth:
        cache.place([(s, n) for s, n in enumerate(step) if n])
        for s in range(N_SEQ):
            assert len(kc.blocks_of(cache.cells, [s], size)) == -(-cache.n(s) // size)


def test_a_block_is_begun_only_when_those_that_one_alone_lives_in_are_full():
    cache = Cache(64, 8)
    cache.place([(0, 24)])
    # As a policy that drops from the middle of the first two blocks.
    cache.cells = kc.seq_rm(cache.cells, 0, 5, 12)
    assert sorted(cache.place([(0, 7)])) == list(range(5, 12))
    assert cache.place([(0, 1)]) == [24]


def test_those_who_share_a_block_do_not_alternate():
    cache = Cache(16, 16)
    assert cache.place([(0, 2)]) == [0, 1]
    assert cache.place([(1, 2)]) == [9, 10]
    assert cache.place([(0, 2), (1, 2)]) == [2, 3, 11, 12]
    assert cache.place([(0, 5), (1, 3)]) == [4, 5, 6, 7, 8, 13, 14, 15]


def test_blocks_wanted_are_counted_beyond_those_without_a_token():
    cache = Cache(32, 8)
    ids = np.repeat(np.arange(4, dtype=np.int32), [3, 9, 1, 1])

    def wanted(n_tokens):
        return n_blocks_wanted(cache.cells, cache.ends, ids[:n_tokens], 8)

    assert [wanted(n) for n in (0, 3, 12, 13, 14)] == [0, 0, 0, 0, 1]
    cache.place([(0, 3)])
    assert wanted(3) == 0 and wanted(14) == 1
    cache.place([(1, 24)])
    assert wanted(3) == 0 and wanted(12) == 2

"""The pool against a list of free blocks, and what it refuses."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from paged_cases import text

from kvrt.errors import BadConfig, CacheFull, UsageError
from kvrt.paged.hashing import Chain
from kvrt.paged.pool import BlockPool

N = 9


def hashes(n):
    chain = Chain(2)
    chain.extend(text(2 * n))
    return chain.hashes


ENTRIES = hashes(4)


class Plain:
    """The same, over one list."""

    def __init__(self, order):
        self.order, self.queue = order, list(range(1, N))
        self.refs, self.keys = dict.fromkeys(range(N), 0), {}

    def take(self, n):
        out, self.queue = self.queue[:n], self.queue[n:]
        for block in out:
            self.refs[block] = 1
            self.keys.pop(block, None)
        return out

    def touch(self, ids):
        for block in filter(None, ids):
            if not self.refs[block]:
                self.queue.remove(block)
            self.refs[block] += 1

    def free(self, ids):
        idle = []
        for block in filter(None, ids):
            self.refs[block] -= 1
            if not self.refs[block]:
                idle.append(block)
        if self.order == "unhashed_first":
            self.queue = [b for b in idle if b not in self.keys] + self.queue
            idle = [b for b in idle if b in self.keys]
        self.queue += idle


CALLS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 4)),
    st.tuples(st.sampled_from(["free", "touch"]), st.lists(st.integers(0, N - 1), max_size=5)),
    st.tuples(st.just("register"), st.tuples(st.integers(1, N - 1), st.integers(0, 3))),
    st.tuples(st.just("forget"), st.lists(st.integers(0, N - 1), max_size=2)),
)


@given(st.sampled_from(["unhashed_first", "by_time"]), st.lists(CALLS, max_size=30))
@settings(max_examples=60)
def test_a_pool_is_a_list_that_is_quick(order, calls):
    pool, plain = BlockPool(N, order=order), Plain(order)
    for name, value in calls:
        if name == "take":
            if value > len(plain.queue):
                with pytest.raises(CacheFull):
                    pool.take(value)
            else:
                assert pool.take(value) == plain.take(value)
        elif name == "free":
            if any(value.count(b) > plain.refs[b] for b in value if b):
                with pytest.raises(UsageError, match="more often than it is held"):
                    pool.free(value)
            else:
                pool.free(value)
                plain.free(value)
        elif name == "touch":
            pool.touch(value)
            plain.touch(value)
        elif name == "forget":
            pool.forget(value)
            for block in value:
                plain.keys.pop(block, None)
        else:
            register(pool, plain, *value)
        assert pool.queue() == plain.queue
        assert [pool.n_refs(b) for b in range(N)] == list(plain.refs.values())
        assert pool.n_free == len(plain.queue)
        assert pool.usage == pytest.approx(1 - len(plain.queue) / (N - 1))
        assert pool.n_cached == sum(b in plain.keys for b in plain.queue)
        for i, entry in enumerate(ENTRIES):
            holders = [b for b, keys in plain.keys.items() if i in keys]
            assert (pool.find(0, entry) in holders) if holders else (pool.find(0, entry) is None)


def register(pool, plain, block, i):
    if plain.refs[block]:
        pool.register(block, 0, ENTRIES[i])
        plain.keys.setdefault(block, set()).add(i)
    else:
        with pytest.raises(UsageError, match="held by nobody"):
            pool.register(block, 0, ENTRIES[i])


def test_a_block_owns_several_keys_and_loses_them_together():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    for group, entry in ((0, ENTRIES[0]), (0, ENTRIES[1]), (1, ENTRIES[0]), (0, ENTRIES[0])):
        pool.register(block, group, entry)
    assert len(pool.keys(block)) == 3
    pool.free([block])
    assert pool.take(1) == [block]
    assert pool.keys(block) == ()
    assert pool.n_evicted == 3
    assert pool.find(1, ENTRIES[0]) is None


def test_held_blocks_can_be_forgotten():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.register(block, 0, ENTRIES[0])
    pool.forget([block, 2])
    assert pool.find(0, ENTRIES[0]) is None
    assert pool.n_refs(block) == 1


@pytest.mark.parametrize("ids", [[-1], [N], [1, 2, N]])
@pytest.mark.parametrize("name", ["touch", "free", "forget"])
def test_ids_that_are_not_there(name, ids):
    pool = BlockPool(N)
    pool.take(4)
    with pytest.raises(UsageError, match=f"ids are 0 to {N - 1}"):
        getattr(pool, name)(ids)
    assert (pool.n_refs(1), pool.n_free) == (1, N - 5)


def test_a_pool_of_nothing():
    pool = BlockPool(1)
    assert (pool.n_free, pool.usage, pool.queue(), pool.take(0)) == (0, 0.0, [], [])
    with pytest.raises(CacheFull, match="1 blocks wanted, 0 of 0 are free"):
        pool.take(1)
    with pytest.raises(BadConfig, match="null block"):
        BlockPool(0)


def test_without_caching_blocks_are_used_in_turn():
    pool = BlockPool(4, caching=False)
    (block,) = pool.take(1)
    pool.register(block, 0, ENTRIES[0])
    assert pool.find(0, ENTRIES[0]) is None
    pool.free([block])
    assert pool.queue() == [2, 3, 1]


def test_blocks_behind_the_last_one_are_taken_first_then_those_of_the_emptiest_span():
    pool = BlockPool(13, span=4)  # spans of blocks 1 to 4, 5 to 8 and 9 to 12
    a = pool.take(2)
    b = pool.take(3)
    assert (a, b) == ([1, 2], [5, 6, 7])
    assert pool.take(3, a[-1]) == [3, 4, 9]  # a span of its own while there is one
    assert pool.take(2, b[-1]) == [8, 11]  # in the middle of what is empty
    assert pool.n_free == 2 and sorted(pool.queue()) == [10, 12]
    pool.free([5, 6, 7])
    assert pool.take(4, 11) == [12, 6, 7, 5]
    with pytest.raises(CacheFull, match="2 blocks wanted, 1 of 12 are free"):
        pool.take(2)


def test_where_no_block_is_empty_a_span_loses_its_hashes_at_once():
    pool, prompt = BlockPool(9, span=4), Chain(1)
    prompt.extend(range(8))
    blocks = pool.take(8)
    for block, entry in zip(blocks, prompt.hashes, strict=True):
        pool.register(block, 0, entry)
    pool.free(blocks[::-1])
    pool.touch([2])  # somebody found it
    assert pool.take(2) == [5, 6] and pool.n_evicted == 4
    assert [pool.find(0, e) for e in prompt.hashes] == [1, 2, 3, 4, None, None, None, None]
    pool.forget([3])
    assert pool.take(3, 6) == [7, 8, 3]

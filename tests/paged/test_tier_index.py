"""Keys of a tier: the worked cases of LRU, ARC and the filter, and random histories of both."""

import collections
from collections.abc import Collection

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrt.errors import BadConfig
from kvrt.paged.tiers.arc import Arc
from kvrt.paged.tiers.index import Reserved, TierIndex


def prepare_store(index: TierIndex, keys: Collection[int]) -> Reserved | None:
    """Places for those of the keys that are not there; none of the keys is evicted for them."""
    return index.reserve(index.wanted(keys), keep=set(keys))


def stored(index: TierIndex, *keys: int) -> tuple[int, ...] | None:
    """Stores keys at once; the ids that they got."""
    places = prepare_store(index, keys)
    if places is not None:
        index.complete_store(keys)
    return places and places.ids


def arc(index: TierIndex) -> Arc:
    assert isinstance(index._policy, Arc)
    return index._policy


def test_the_story_of_lru():
    """O47."""
    index = TierIndex(4)
    assert prepare_store(index, [1, 2]) == ((1, 2), (0, 1), ())
    assert [index.lookup(k) for k in (1, 2, 3)] == [None, None, False]
    index.complete_store([1, 2])
    assert [index.lookup(k) for k in (1, 2)] == [True, True]
    assert prepare_store(index, [2, 3, 4, 5]) == ((3, 4, 5), (2, 3, 0), (1,))
    assert prepare_store(index, [1, 6]) is None
    assert (index.n_used, index.n_idle) == (4, 1)
    index.complete_store([2, 3, 4, 5])
    assert index.prepare_load([2, 3]) == (1, 2)
    assert prepare_store(index, [6, 7, 8]) is None
    index.complete_load([2, 3])
    assert prepare_store(index, [6, 7, 8]) == ((6, 7, 8), (3, 2, 1), (2, 3, 4))
    index.complete_store([6, 7, 8])
    index.touch([5, 6, 7])
    assert prepare_store(index, [7, 9]) == ((9,), (1,), (8,))
    index.complete_store([7, 9], success=False)
    assert [index.lookup(k) for k in (7, 9)] == [True, False]


def test_arc_takes_from_those_used_once():
    """O49."""
    index = TierIndex(4, policy="arc")
    stored(index, 1, 2, 3, 4)
    index.touch([3, 4])
    assert (list(arc(index).once), list(arc(index).again)) == ([1, 2], [4, 3])
    arc(index).target = 1
    places = prepare_store(index, [5])
    assert places is not None and places.evicted == (1,)
    assert list(arc(index).gone_once) == [1]


def test_arc_moves_what_is_used_again():
    """O49: [1, 3, 4] after [3, 4] leaves 2 alone, which goes next; its id is used again."""
    index = TierIndex(4, policy="arc")
    stored(index, 1, 2, 3, 4)
    index.touch([3, 4])
    index.touch([1, 3, 4])
    assert (list(arc(index).once), list(arc(index).again)) == ([2], [4, 3, 1])
    assert prepare_store(index, [5]) == ((5,), (1,), (2,))


def test_arc_learns_from_ghosts():
    """O49: capacity 2."""
    index = TierIndex(2, policy="arc")
    for key in (1, 2, 3):
        stored(index, key)
    assert list(arc(index).gone_once) == [1] and arc(index).target == 0
    index.touch([1])
    assert arc(index).target == 1
    for _ in range(9):
        index.touch([1])
    assert arc(index).target == 2  # never above the capacity
    stored(index, 1)
    assert list(arc(index).again) == [1] and 1 not in arc(index).gone_once


def test_a_ghost_of_what_was_used_again_moves_the_border_back():
    index = TierIndex(2, policy="arc")
    stored(index, 1, 2)
    index.touch([1, 2])
    arc(index).target = 2.0
    stored(index, 3)  # below its target, `once` gives nothing
    assert list(arc(index).gone_again) == [2]
    index.touch([2])
    assert arc(index).target == 1
    for _ in range(9):
        index.touch([2])
    assert arc(index).target == 0


def test_ghosts_never_exceed_the_capacity():
    """O49."""
    index = TierIndex(3, policy="arc")
    for key in range(50):
        stored(index, key)
        if key % 2:
            index.touch([key])
        assert max(len(arc(index).gone_once), len(arc(index).gone_again)) <= 3


@pytest.mark.parametrize("n", [1, 2])
def test_arc_falls_back_to_the_other_list(n):
    """2.14: T1 = {2, 3}, T2 empty, target 2; a legal store of two blocks was refused."""
    index = TierIndex(2, policy="arc")
    stored(index, 2, 3)
    arc(index).target = 2.0
    places = prepare_store(index, [8, 9][:n])
    assert places is not None and places.evicted == (2, 3)[:n]


def test_arc_falls_back_when_the_preferred_list_is_read():
    index = TierIndex(2, policy="arc")
    stored(index, 1, 2)
    index.touch([2])
    index.prepare_load([1])
    places = prepare_store(index, [3])
    assert places is not None and places.evicted == (2,)
    assert prepare_store(index, [4]) is None and list(arc(index).once) == [1, 3]


class Watched(Arc):
    """Counts what it is asked."""

    n_asked = 0

    def evict(self, n, keep):
        self.n_asked += 1
        return super().evict(n, keep)


def test_two_loads_pin_once_and_a_refusal_asks_no_policy():
    """O52."""
    index = TierIndex(2)
    index._policy = watched = Watched(2)
    stored(index, 1, 2)
    assert index.n_idle == 2
    index.prepare_load([1])
    index.prepare_load([1])
    assert index.n_idle == 1
    assert prepare_store(index, [3, 4]) is None and watched.n_asked == 0
    index.complete_load([1])
    assert index.n_idle == 1 and prepare_store(index, [3, 4]) is None
    index.complete_load([1])
    assert index.n_idle == 2
    assert stored(index, 3, 4) == (1, 0) and watched.n_asked == 1


def test_a_store_never_takes_the_place_of_its_own_keys():
    index = TierIndex(2)
    stored(index, 1, 2)
    assert prepare_store(index, [1, 3]) == ((3,), (1,), (2,))
    index.complete_store([3])
    assert prepare_store(index, [1, 3, 4]) is None and index.n_idle == 2
    assert prepare_store(index, [5, 5]) is not None and index.n_used == 2  # once


def test_what_is_worth_nothing_is_dropped_unless_it_is_read():
    index = TierIndex(3)
    stored(index, 1, 2)
    prepare_store(index, [3])
    index.prepare_load([2])
    index.drop([1, 2, 3, 4])
    assert [index.lookup(k) for k in (1, 2, 3)] == [False, True, None]


def test_a_tier_without_room_is_refused():
    with pytest.raises(BadConfig, match="at least 1"):
        TierIndex(0)


KEYS = st.integers(0, 11)


class IndexMachine(RuleBasedStateMachine):
    """An index beside plain sets: what is there, what is coming, how often each key is read."""

    @initialize(n=st.integers(1, 6), policy=st.sampled_from(["lru", "arc"]))
    def begin(self, n, policy):
        self.index = TierIndex(n, policy=policy)
        self.ready: dict[int, int] = {}
        self.coming: dict[int, int] = {}
        self.readers: collections.Counter[int] = collections.Counter()

    @rule(keys=st.lists(KEYS, max_size=5))
    def prepare_store(self, keys):
        new = {k for k in keys if k not in self.ready and k not in self.coming}
        idle = {k for k in self.ready if not self.readers[k]} - set(keys)
        free = self.index.n_blocks - len(self.ready) - len(self.coming)
        places = prepare_store(self.index, keys)
        # Refused if and only if there is no room, whatever the policy.
        assert (places is None) == (len(new) > free + len(idle))
        if places is None:
            return
        assert set(places.keys) == new and set(places.evicted) <= idle
        assert len(places.evicted) == max(len(new) - free, 0)
        for key in places.evicted:
            del self.ready[key]
        self.coming |= dict(zip(places.keys, places.ids, strict=True))

    @rule(keys=st.lists(KEYS, max_size=5), success=st.booleans())
    def complete_store(self, keys, success):
        self.index.complete_store(keys, success)
        for key in keys:
            if key in self.coming:
                block_id = self.coming.pop(key)
                if success:
                    self.ready[key] = block_id

    @precondition(lambda self: hasattr(self, "index") and self.ready)
    @rule(data=st.data())
    def load(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.ready)), unique=True))
        assert self.index.prepare_load(keys) == tuple(self.ready[k] for k in keys)
        self.readers.update(keys)

    @rule()
    def complete_load(self):
        keys = [k for k, n in self.readers.items() if n > 0][:2]
        self.index.complete_load(keys)
        self.readers.subtract(keys)

    @rule(keys=st.lists(KEYS, max_size=4))
    def touch(self, keys):
        self.index.touch(keys)

    @rule(keys=st.lists(KEYS, max_size=2))
    def drop(self, keys):
        self.index.drop(keys)
        for key in keys:
            if key in self.ready and not self.readers[key]:
                del self.ready[key]

    @invariant()
    def agrees(self):
        if not hasattr(self, "index"):
            return
        index = self.index
        for key in range(12):
            expected = True if key in self.ready else None if key in self.coming else False
            assert index.lookup(key) is expected
        ids = [*self.ready.values(), *self.coming.values()]
        assert len(set(ids)) == len(ids) == index.n_used <= index.n_blocks
        assert all(0 <= i < index.n_blocks for i in ids)
        assert index.n_idle == sum(not self.readers[k] for k in self.ready)
        if isinstance(index._policy, Arc):
            policy = index._policy
            assert len(policy.gone_once) <= index.n_blocks >= len(policy.gone_again)
            assert not (policy.once.keys() | policy.again.keys()) & (
                policy.gone_once.keys() | policy.gone_again.keys()
            )


TestIndex = IndexMachine.TestCase
TestIndex.settings = hypothesis.settings(max_examples=25, stateful_step_count=30, deadline=None)

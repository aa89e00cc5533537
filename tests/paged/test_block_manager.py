"""What the coordinator takes, shares, copies and refuses, beside the reference's cases."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from paged_cases import Cache, chunked, full, state, text, window

from kvrt.errors import BadConfig, BadRange, UsageError
from kvrt.paged.layout.spec import PagedGroup
from kvrt.paged.requests.copies import BlockCopy

# --- room -----------------------------------------------------------------------------------------


def test_room_is_that_of_the_group_with_least():
    c = Cache([full(16), window(32, b=4), state(8)], 64)
    c.start("A", text(21))
    assert c.paged.n_capacity("A") == 24
    assert c.paged.allocate("A", 24) == ((), (), ())
    assert [len(new) for new in c.paged.allocate("A", 25)] == [0, 1, 1]
    assert c.paged.n_capacity("A") == 28


def test_drafts_have_room_but_no_states():
    c = Cache([full(4), state(4)], 64, n_ctx=16, n_lookahead=4)
    c.paged.allocate("A", 7)
    assert list(map(len, c.tables("A"))) == [3, 2]
    c.paged.allocate("A", 15)
    assert list(map(len, c.tables("A"))) == [4, 4]  # no request is longer than n_ctx
    assert c.tables("A")[1].count(0) == 2


def test_a_request_without_groups_has_all_the_room():
    c = Cache([], 1, n_ctx=64)
    assert c.start("A", text(30))[0].n_tokens == 0
    assert c.paged.n_capacity("A") == 64
    c.paged.free("A")


def test_layers_that_share_read_anothers_table():
    shared = PagedGroup(kind="shared", layers=(5,), block_size=16, target=0)
    c = Cache([full(), shared, window(32)], 16)
    _, new = c.start("A", text(40))
    assert list(map(len, new)) == [3, 0, 3]
    assert c.paged.table("A", 1) == c.paged.table("A", 0)
    assert sum(c.paged.n_peak(40)) == 6
    assert [len(b) for b in c.hit(text(40)).blocks] == [2, 0, 2]
    assert c.paged.fork("A", "B", 40) == [BlockCopy(0, 3, 7), BlockCopy(2, 6, 8)]
    c.paged.free("A")
    c.paged.free("B")
    assert c.pool.n_free == 15


def test_groups_are_freed_one_after_the_other_newest_block_first():
    c = Cache([full(4), window(5, b=4)], 9)
    c.start("A", text(11))
    assert c.tables("A") == [[1, 2, 3], [4, 5, 6]]
    c.paged.free("A")
    assert c.pool.queue() == [6, 3, 7, 8, 2, 1, 5, 4]


# --- order and failure ----------------------------------------------------------------------------


def test_of_reserved_blocks_those_are_kept_that_a_request_has_not_taken():
    c = Cache([full()], 11)
    c.start("A", text(16))
    c.paged.reserve("A", [3])
    assert c.paged.promises.n_kept() == [2] and c.paged.promises.n_kept("A") == [0]
    c.grow("A", 48)
    assert c.paged.promises.n_kept() == [0]


def test_all_hits_are_held_before_a_block_is_taken():
    c = Cache([full(4), window(5, b=4)], 8, order="by_time")
    c.start("A", text(9))
    c.paged.free("A")
    # Only what A left is free, and the window's hit goes before what nobody can find.
    assert c.pool.take(2) == [7, 3]
    c.pool.touch([6, 4])
    c.pool.free([6, 4])
    assert c.pool.queue() == [2, 1, 5, 6, 4]
    hit, new = c.start("B", text(9))
    assert (hit.n_tokens, hit.blocks) == (8, ((1, 2), (0, 5)))
    assert new == ((6,), (4,))
    assert c.tables("B") == [[1, 2, 6], [0, 5, 4]]


def test_a_hit_that_does_not_fit_changes_nothing():
    c = Cache([full(4), window(5, b=4)], 8)
    c.start("A", text(9))
    c.paged.free("A")
    c.pool.take(3)
    before = c.photo()
    assert c.hit(text(9)).n_tokens == 8
    assert c.start("B", text(9)) is None
    assert c.photo() == before


def test_every_pool_is_asked_before_one_changes():
    c = Cache([full(4), state(4, pool=1), window(5, b=4, pool=2)], (20, 20, 3))
    assert c.start("A", text(8)) is not None
    before = c.photo()
    assert c.start("B", text(8, 1)) is None
    assert c.paged.allocate("A", 9) is None
    assert c.photo() == before
    # What slid out of the window makes room for what comes.
    assert c.paged.allocate("A", 9, n_settled=8) is not None


def test_a_hit_is_good_until_a_block_is_evicted():
    c = Cache([full(4)], 6)
    c.start("A", text(9))
    c.paged.free("A")
    chain = c.chain(text(9))
    hit = c.paged.find_hit(chain)
    c.start("B", text(17, 1))
    before = c.photo()
    with pytest.raises(UsageError, match="find it again"):
        c.paged.allocate("C", 9, chain=chain, hit=hit)
    assert c.photo() == before


def test_running_requests_take_no_hits():
    c = Cache([full(4)], 9)
    c.start("A", text(9))
    with pytest.raises(UsageError, match="'A' is running"):
        c.paged.allocate("A", 12, hit=c.hit(text(9)))


@pytest.mark.parametrize(
    ("n_tokens", "n_settled"), [(0, None), (65, None), (12, 13), (30, 21), (12, -1)]
)
def test_numbers_out_of_range(n_tokens, n_settled):
    c = Cache([full(4)], 30, n_ctx=64)
    c.start("A", text(20))
    before = c.photo()
    with pytest.raises(BadRange):
        c.paged.allocate("A", n_tokens, n_settled=n_settled)
    with pytest.raises(BadRange, match="from 1 to 20"):
        c.paged.register("A", 25)
    assert c.photo() == before


GROUPS = {
    "full": lambda b, size: full(b),
    "window": lambda b, size: window(size, b=b),
    "chunked": lambda b, size: chunked(size, b=b),
    "state": lambda b, size: state(b),
}


KINDS = st.tuples(st.sampled_from(sorted(GROUPS)), st.sampled_from([1, 2, 4]), st.integers(1, 9))


@given(
    st.lists(KINDS, min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
)
@settings(max_examples=20)
def test_what_was_admitted_whole_never_lacks_a_block(kinds, chunk, n_prompt, n_answer, partial):
    groups = [GROUPS[kind](b, size) for kind, b, size in kinds]
    partial = partial and all(g.kind in ("full", "recurrent") for g in groups)
    n = n_prompt + n_answer
    rest = {"n_in_flight": chunk, "n_ctx": 128, "partial": partial}
    (n_peak,) = Cache(groups, 200, **rest).paged.n_peak(n)
    c = Cache(groups, n_peak + 1, **rest)
    for name in ("A", "B"):  # the second one hits what the first one left
        chain = c.chain(text(n_prompt))
        hit = c.paged.find_hit(chain)
        done, end = hit.n_tokens, min(n_prompt, hit.n_tokens + chunk)
        assert c.paged.allocate(name, end, chain=chain, hit=hit, whole=n) is not None
        while done < n:
            c.paged.take_copies()
            chain.extend(text(end, 1)[len(chain.tokens) :])
            c.paged.register(name, end)
            c.paged.new_step()
            done, end = end, min(n_prompt, end + chunk) if end < n_prompt else min(n, end + 1)
            assert c.paged.allocate(name, end, n_settled=done) is not None
        c.paged.free(name)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([full(4)], {"checkpoint_interval": 4}, "without a window or a state"),
        ([window(4, b=4)], {"checkpoint_interval": 6}, "a multiple of 4"),
        ([window(4, b=4)], {"checkpoint_interval": -4}, "a multiple of 4"),
        ([full(4), full(6)], {"hash_block_size": 4}, "common divisor"),
        ([full(4)], {"hash_block_size": 0}, "common divisor"),
        ([full(4, pool=1)], {}, "pool 1; there are 1"),
        ([state(4)], {"drafts": [0]}, "only full groups and windows draft"),
        ([PagedGroup(kind="shared", layers=(0,), block_size=4, target=0)], {}, "another group"),
        (
            [full(4), PagedGroup(kind="shared", layers=(0,), block_size=8, target=0)],
            {},
            "of 8 tokens",
        ),
    ],
)
def test_what_does_not_fit_together(groups, options, message):
    with pytest.raises(BadConfig, match=message):
        Cache(groups, 8, **options)


@pytest.mark.parametrize(
    ("checkpoint_interval", "kept"),
    [(None, [1, 3, 5, 7, 9]), (16, [3, 7, 9]), (0, [9])],
)
def test_what_is_retained_of_a_window(checkpoint_interval, kept):
    c = Cache([full(8), window(5, b=4)], 64, checkpoint_interval=checkpoint_interval)
    c.start("A", text(43))
    assert c.registered("A", 0) == [0, 1, 2, 3, 4]
    assert c.registered("A", 1) == kept


@pytest.mark.parametrize(
    ("checkpoint_interval", "kept"), [(None, [1, 3, 5, 7, 9]), (16, [3, 7, 9]), (0, [9])]
)
def test_what_is_retained_of_states(checkpoint_interval, kept):
    c = Cache([full(8), state(4)], 64, checkpoint_interval=checkpoint_interval)
    chain = c.chain(text(43))
    kept_so_far = set()
    for end in range(4, 44, 4):
        c.paged.allocate(
            "A", end, n_settled=end - 4 or None, **({"chain": chain} if end == 4 else {})
        )
        c.paged.register("A", end)
        kept_so_far |= set(c.registered("A", 1))
    assert sorted(kept_so_far) == kept


def test_the_junction_of_two_texts_is_retained():
    c = Cache([full(8), window(5, b=4)], 64, checkpoint_interval=0)
    c.start("A", text(43))
    branch = [*text(24), *text(19, 1)]
    hit, _ = c.start("B", branch)
    assert (hit.n_tokens, hit.n_common) == (0, 24)
    assert 5 in c.registered("B", 1)
    assert c.hit([*text(24), 1]).n_tokens == 24


def test_chains_of_another_block_size_are_refused():
    c, other = Cache([full(8)], 8), Cache([full(4)], 8)
    with pytest.raises(UsageError, match="blocks of 4 tokens; these groups need 8"):
        c.paged.find_hit(other.chain(text(9)))

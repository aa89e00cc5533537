"""Forks, states and copies of the coordinator: what is shared, and what is copied when."""

import pytest
from paged_cases import Cache, full, state, text, window

from kvrt.errors import BadRange, CacheFull, CannotRewind, UsageError
from kvrt.paged.requests.copies import BlockCopy

# --- forks ----------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_last():
    c = Cache([full(4), state(4), window(5, b=4)], 64)
    c.start("A", text(10), chunk=4)
    (one, two, three), states, seen = c.tables("A")
    assert states[:2] != [0, 0]
    copies = c.paged.fork("A", "B", 10)
    new = [t[2] for t in c.tables("B")]
    assert copies == [
        BlockCopy(0, three, new[0]),
        BlockCopy(1, states[2], new[1]),
        BlockCopy(2, seen[2], new[2]),
    ]
    assert c.tables("B") == [[one, two, new[0]], [0, 0, new[1]], [0, seen[1], new[2]]]
    assert [c.pool.n_refs(b) for b in (one, two, three, seen[1])] == [2, 2, 1, 2]
    assert c.paged.n_capacity("B") == 12
    # Both go on in blocks of their own.
    assert c.paged.allocate("A", 12) == c.paged.allocate("B", 12) == ((), (), ())


def test_a_fork_between_blocks_copies_nothing():
    c = Cache([full(4), state(4)], 64)
    c.start("A", text(8), chunk=4)
    assert c.paged.fork("A", "B", 8) == c.paged.fork("A", "C", 4) == []
    assert c.tables("B") == [c.tables("A")[0], [0, c.tables("A")[1][1]]]
    # The state is read by both; each of them writes the next one to a block of its own.
    new = [c.paged.allocate(name, 9, n_settled=8)[1] for name in "AB"]
    assert new[0] != new[1]


def test_a_fork_that_is_registered_is_found_by_both_texts():
    c = Cache([full(4)], 64)
    c.start("A", text(6))
    chain = c.chain(text(6))
    c.paged.fork("A", "B", 6, chain=chain)
    chain.extend([1, 2])
    c.paged.register("B", 8)
    c.grow("A", 8)
    assert c.hit([*text(6), 1, 2, 3]).blocks == (tuple(c.tables("B")[0]),)
    assert c.hit([*text(6), *text(8, 7)[6:], 3]).blocks == (tuple(c.tables("A")[0]),)


def test_registering_tells_what_can_be_found_from_now_on():
    c = Cache([full(4), window(5, b=8)], 64)
    chain = c.chain(text(20))
    c.paged.allocate("A", 20, chain=chain)
    (one, two, *_), (wide, *_) = c.tables("A")
    wanted = [(0, one, chain.hashes[0]), (0, two, chain.hashes[1]), (1, wide, chain.entries(2)[0])]
    assert c.paged.register("A", 9) == wanted
    assert c.paged.register("A", 9) == c.paged.register("A", 15) == []
    assert [g for g, *_ in c.paged.register("A", 16)] == [0, 0, 1]
    assert Cache([full(4)], 9, caching=False).start("B", text(9)) is not None


def test_what_cannot_be_forked():
    c = Cache([full(4), window(5, b=4)], 12)
    c.start("A", text(18), chunk=6)
    before = c.photo()
    with pytest.raises(CannotRewind, match="window group no longer holds"):
        c.paged.fork("A", "B", 9)
    with pytest.raises(BadRange, match="from 1 to 20"):
        c.paged.fork("A", "B", 21)
    with pytest.raises(UsageError, match="'A' has blocks already"):
        c.paged.fork("A", "A", 18)
    c.pool.take(c.pool.n_free - 1)
    before = c.photo()
    with pytest.raises(CacheFull, match="copies 2 blocks, 1 of 11 are free"):
        c.paged.fork("A", "B", 18)
    assert c.photo() == before


def test_a_state_that_was_overwritten_cannot_be_forked():
    c = Cache([state(4)], 12)
    c.start("A", text(10), chunk=6)
    # The step from 6 to 10 left the block of 4 to 8 with the state after 6.
    with pytest.raises(CannotRewind, match="recurrent"):
        c.paged.fork("A", "B", 8)
    c.paged.fork("A", "B", 10)


def test_the_state_within_a_block_is_that_of_the_last_token():
    c = Cache([state(4)], 12)
    c.start("A", text(8), chunk=4)
    # The first block is still held, with the state after 4.
    with pytest.raises(CannotRewind, match="recurrent"):
        c.paged.fork("A", "B", 3)
    assert c.paged.fork("A", "B", 4) == []


# --- states and copies ----------------------------------------------------------------------------


def test_only_states_at_the_end_of_a_block_are_found():
    c = Cache([state(4)], 32)
    c.start("A", text(30), chunk=6)  # ends at 6, 12, 18, 24, 30
    c.paged.new_step()
    assert c.hit(text(31)).n_tokens == 24
    assert c.hit(text(24)).n_tokens == 12


def test_a_step_made_longer_takes_its_state_along():
    c = Cache([state(4), full(4)], 32)
    chain = c.chain(text(20))
    c.paged.allocate("A", 8, chain=chain)
    n_free = c.pool.n_free
    (taken, rows) = c.paged.allocate("A", 16, n_settled=0)
    # The state after 8 tokens is not written: its block is the one after 16.
    assert taken == ()
    assert list(c.paged.table("A", 0)[:3]) == [0, 0, 0]
    assert c.paged.table("A", 0)[3]
    assert c.pool.n_free == n_free - len(rows)
    c.paged.register("A", 16)
    c.paged.new_step()
    assert c.hit(text(17)).n_tokens == 16
    assert c.hit(text(16)).n_tokens == 0


def test_single_tokens_leave_a_state_at_every_block():
    c = Cache([state(4)], 32)
    c.start("A", text(6), chunk=6)
    chain = c.chains["A"]
    for n in range(7, 14):
        chain.extend([n])
        if n > c.paged.n_capacity("A"):
            c.paged.allocate("A", n, n_settled=n - 1)
        c.paged.register("A", n)
    assert c.paged.find_hit(chain).n_tokens == 12


def test_a_state_further_on_is_not_that_of_a_prompts_end():
    c = Cache([state(4)], 32, hash_block_size=2, partial=True)
    c.start("A", text(7))  # one step, past the end of the last hash block at 6
    assert c.paged.take_copies() == []
    assert c.hit(text(9)).n_tokens == 0


def test_a_copy_holds_both_ends_until_its_step_is_over():
    c = Cache([full(4)], 64, hash_block_size=2, partial=True)
    c.start("A", text(7))
    src = c.tables("A")[0][1]
    hit, new = c.start("B", [*text(6), 1, 2])
    (dst,) = new[0]
    assert (hit.n_tokens, c.tables("B")[0]) == (6, [c.tables("A")[0][0], dst])
    c.paged.free("A")
    c.paged.free("B")
    assert (c.pool.n_refs(src), c.pool.n_refs(dst)) == (1, 1)
    c.paged.new_step()  # it is not copied yet
    assert c.paged.take_copies() == [BlockCopy(0, src, dst)]
    assert c.paged.take_copies() == []
    assert c.pool.n_refs(src) == 1
    c.paged.new_step()
    assert c.pool.n_free == 63


def test_a_fork_of_what_is_yet_to_be_copied_copies_from_where_it_lies():
    c = Cache([full(4)], 64, hash_block_size=2, partial=True)
    c.start("A", text(7))
    src = c.tables("A")[0][1]
    c.start("B", [*text(6), 1, 2], chunk=1)
    ((_, copied_from, _),) = c.paged.fork("B", "C", 6)
    assert copied_from == src


def test_a_full_pool_keeps_no_copy_of_a_state():
    c = Cache([state(4)], 3, hash_block_size=2, partial=True)
    assert c.start("A", text(6)) is not None
    c = Cache([state(4, pool=0), full(4, pool=1)], (2, 9), hash_block_size=2, partial=True)
    c.paged.allocate("A", 2, chain=c.chain(text(3)))
    c.paged.register("A", 2)
    assert c.paged.take_copies() == []
    assert c.hit(text(3)).n_tokens == 0

"""Cases of the pool and the prefix cache with one group, by their numbers; ids count null as 0."""

import pytest
from paged_cases import Cache, full, text

from kvrt.paged.hashing import Chain, root
from kvrt.paged.pool import BlockPool, BlockRemoved, HashIndex

NEW, OLD = "unhashed_first", "by_time"


@pytest.mark.parametrize(
    ("order", "freed", "third", "fourth"),
    [
        (NEW, [5, 4, 6, 7, 8, 9, 10, 3, 2, 1], 5, [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]),
        (OLD, [6, 7, 8, 9, 10, 4, 5, 3, 2, 1], 6, [7, 8, 9, 10, 4, 5, 6, 3, 2, 1]),
    ],
)
def test_o1_order_of_reuse(order, freed, third, fourth):
    c, common = Cache([full()], 11, order=order), text(48)
    c.start("A", common + text(7, 1))
    assert c.tables("A") == [[1, 2, 3, 4]]
    assert c.registered("A", 0) == [0, 1, 2]
    hit, new = c.start("B", common + text(5, 2))
    assert (hit.n_tokens, hit.blocks, new) == (48, ((1, 2, 3),), ((5,),))
    assert [c.pool.n_refs(b) for b in (1, 2, 3)] == [2, 2, 2]
    assert c.pool.n_free == 5
    c.paged.free("A")
    c.paged.free("B")
    assert c.pool.queue() == freed
    hit, new = c.start("C", common + text(6, 3))
    assert (hit.blocks, new) == (((1, 2, 3),), ((third,),))
    c.paged.free("C")
    hit, new = c.start("D", text(160, 4))
    assert hit.n_tokens == 0
    assert list(new[0]) == fourth
    assert c.hit([*common, 1]).n_tokens == 0


@pytest.mark.parametrize(
    ("order", "freed", "taken"),
    [
        (OLD, [10, 6, 5, 4, 3, 2, 1, 9, 8, 7], 10),
        (NEW, [6, 10, 5, 4, 3, 2, 1, 9, 8, 7], 6),
    ],
)
def test_o2_free_queue_of_two_requests(order, freed, taken):
    c = Cache([full()], 11, order=order)
    c.start("A", text(87))
    c.start("B", text(48, 1))
    assert c.tables("A") + c.tables("B") == [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    c.paged.free("A")
    c.paged.free("B")
    assert c.pool.queue() == freed
    hit, new = c.start("C", text(35))
    assert (hit.n_tokens, hit.blocks, new) == (32, ((1, 2),), ((taken,),))
    assert c.pool.n_free == 7


def test_o3_an_exact_multiple_is_not_hit_whole():
    c = Cache([full()], 11)
    c.start("A", text(48))
    assert c.hit(text(48)).n_tokens == 32
    assert c.hit(text(49)).n_tokens == 48


def test_o6_a_stale_hash_is_cleared():
    c = Cache([full()], 2)
    c.start("A", text(16))
    assert c.pool.keys(1)
    c.paged.free("A")
    c.start("B", text(15, 1))
    assert c.tables("B") == [[1]]
    assert c.pool.keys(1) == ()


def test_o7_equal_blocks_are_not_merged():
    c = Cache([full()], 11)
    c.start("A", text(40))
    hit, new = c.start("B", text(40), read=False)
    assert (hit.n_tokens, new) == (0, ((4, 5, 6),))
    assert [c.pool.keys(b) for b in (4, 5, 6)] == [c.pool.keys(b) for b in (1, 2, 3)]
    assert [len(c.pool.keys(b)) for b in (4, 5, 6)] == [1, 1, 0]


def test_o8_duplicates_are_evicted_one_by_one():
    (entry,) = chain(range(16)).hashes
    index = HashIndex()
    index.add(0, entry, 0)
    index.add(0, entry, 3)
    assert index.pop(0, entry.digest, 0) == entry
    assert index.find(0, entry) == 3
    assert index.pop(0, entry.digest, 1) is None
    assert index.find(0, entry) == 3
    assert index.pop(0, entry.digest, 3) == entry
    assert index.find(0, entry) is None


def test_o9_salt():
    c = Cache([full()], 11)
    c.start("A", text(55), salt=b"s1")
    assert len(c.hit(text(55), salt=b"s1").blocks[0]) == 3
    assert c.hit(text(55), salt=b"s2").n_tokens == 0
    one, two = (chain(text(48), salt=s).hashes for s in (b"s1", b"s2"))
    assert one[0].extra != two[0].extra
    assert [h.extra for h in one[1:] + two[1:]] == [b""] * 4
    assert all(a.digest != b.digest and a.data == b.data for a, b in zip(one, two, strict=True))


def test_o11_decoding_takes_a_block_when_one_is_full():
    c = Cache([full()], 11)
    c.start("A", text(55))
    assert c.grow("A", 59) == ((),)
    assert c.registered("A", 0) == [0, 1, 2]
    assert c.grow("A", 55 + 19) == ((5,),)
    assert c.registered("A", 0) == [0, 1, 2, 3]


def test_o12_without_caching():
    c = Cache([full(4)], 5, caching=False)
    _, new = c.start("A", text(10))
    assert len(new[0]) == 3
    c.paged.free("A")
    hit, new = c.start("B", text(16))
    assert (hit.n_tokens, len(new[0])) == (0, 4)
    assert c.grow("B", 20) is None


def test_o13_events():
    k, b = 5, 16
    c = Cache([full(b)], k + 1, events=True)
    c.start("A", text(k * b))
    hashes = [h.digest for h in c.chains["A"].hashes]
    assert told(c.pool.take_events()) == [(0, hashes, root(b), text(k * b))]
    c.paged.free("A")
    c.start("B", text(k * b), read=False)
    events = c.pool.take_events()
    assert events[:k] == [BlockRemoved(0, h) for h in reversed(hashes)]
    assert told(events[k:]) == [(0, hashes, root(b), text(k * b))]
    assert c.pool.take_events() == []


def test_o13_the_parent_is_the_chains_even_if_its_block_is_null():
    pool, hashes = BlockPool(4, events=True), chain(text(48)).hashes
    (block,) = pool.take(1)
    pool.register(block, 0, hashes[2])
    wanted = [(0, [hashes[2].digest], hashes[1].digest, text(48)[32:])]
    assert told(pool.take_events()) == wanted


def told(events):
    """Blocks that were stored, with their tokens."""
    return [(x.group, x.hashes, x.parent, x.tokens) for x in events]


def chain(tokens, **extra):
    out = Chain(16, **extra)
    out.extend(list(tokens))
    return out

"""Cases of groups of several kinds, by their numbers."""

import pytest
from paged_cases import Cache, full, state, text, window

from kvrt.paged.kinds import ceil_div


def test_o21_groups_take_blocks_one_after_the_other():
    c = Cache([full(), window(32), window(32)], 21)
    _, new = c.start("A", text(55))
    assert new == ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12))
    hit, new = c.start("B", text(48) + text(7, 1))
    assert hit.n_tokens == 48
    assert hit.blocks == ((1, 2, 3), (0, 6, 7), (0, 10, 11))
    assert new == ((13,), (14,), (15,))


def layers(kinds):
    made = {"f": full(), "s": window(32), "l": window(64), "m": state()}
    return [made[k] for k in kinds]


@pytest.mark.parametrize(
    "kinds", ["fs", "fm", "sm", "sl", "fsm", "fsl", "ffs", "fsfl", "smlm", "fslm", "mmf", "f", "s"]
)
def test_o24_every_combination_hits(kinds):
    groups = layers(kinds)
    c = Cache(groups, 128)
    # A prompt that stops where a block ends leaves its states there.
    assert c.start("A", text(55), chunk=48) is not None
    c.paged.new_step()
    hit, _ = c.start("B", text(48) + text(7, 1))
    assert hit.n_tokens == 48
    assert [len(blocks) for blocks in hit.blocks] == [3] * len(groups)


def test_o24_a_state_of_this_step_is_for_the_next():
    c = Cache([full(), state()], 64)
    c.start("A", text(55), chunk=48)
    before = c.photo()
    assert c.hit([*text(48), 1]).n_tokens == 48
    assert c.start("B", [*text(48), 1]) is None
    assert c.photo() == before
    c.paged.new_step()
    assert c.start("B", [*text(48), 1]) is not None


def test_o26_what_no_hit_can_end_with_is_not_registered():
    c = Cache([full(32), window(32, b=16)], 64)
    c.start("A", text(112))
    assert c.registered("A", 1) == [0, 1, 2, 3, 4, 5]
    assert len(c.tables("A")[1]) == 7


def test_o27_only_the_tail_of_a_segment_is_registered():
    c = Cache([full(32), window(8, b=8)], 64)
    c.start("A", text(64))
    assert c.registered("A", 0) == [0, 1]
    assert c.registered("A", 1) == [3, 7]


def test_o29_a_retained_hit_survives_recycling():
    groups = [full(256), window(512, b=64), window(128, b=8), window(8, b=4)]
    c = Cache(groups, 800, checkpoint_interval=1024, n_in_flight=512)
    c.start("A", text(4096), chunk=512)
    c.paged.free("A")
    for seed in (1, 2):
        hit = c.hit(text(1800))
        assert hit.n_tokens == 1024
        assert [len(blocks) for blocks in hit.blocks] == [4, 16, 128, 256]
        c.start("B", text(4096, seed), chunk=512)
        c.paged.free("B")


def test_o30_admission_counts_the_real_peak():
    def admitted(n_blocks, n_in_flight):
        c = Cache([full(), window(64)], n_blocks, n_in_flight=n_in_flight, n_ctx=1024)
        new = c.paged.allocate("A", 128, whole=512)
        return new is not None, sum(c.paged.n_peak(512))

    assert ceil_div(64 - 1 + 128, 16) + 1 == 13
    assert admitted(78, 128) == (True, 45)
    assert admitted(46, 128) == (True, 45)
    assert admitted(45, 128) == (False, 45)
    # With the whole prompt in flight nothing is recycled.
    assert admitted(78, 512) == (True, 64)
    assert admitted(64, 512) == (False, 64)
    assert admitted(5, 128) == (False, 45)


# --- hits that end within a block -----------------------------------------------------------------


def partial(*groups, fine=2, n_blocks=64):
    return Cache(list(groups), n_blocks, hash_block_size=fine, partial=True)


def test_o35_the_owner_goes_on_and_the_entry_is_a_copy():
    c = partial(full(4), state(4))
    # 6 is the last end of a hash block in a prompt of 7: the step stops there.
    c.start("A", text(7), chunk=6)
    table = c.tables("A")
    (copy,) = c.paged.take_copies()
    assert (copy.group, copy.src) == (1, table[1][1])
    assert copy.dst not in table[0] + table[1]
    assert c.pool.keys(copy.src) == ()
    assert [g for g, _ in c.pool.keys(copy.dst)] == [1]
    hit = c.hit([*text(6), 1, 2])
    assert (hit.n_tokens, hit.blocks[1]) == (6, (0, copy.dst))
    assert c.start("B", [*text(6), 1, 2]) is None
    assert c.grow("A", 8) == ((), ())
    assert c.tables("A") == table
    c.paged.new_step()
    assert c.start("B", [*text(6), 1, 2]) is not None
    assert c.pool.n_refs(copy.dst) == 1  # held until B has its own copy


def test_o36_two_groups_that_end_within_blocks():
    c = partial(full(4), state(4))
    whole, part = c.chain(text(12)), c.chain(text(6))
    full_ids = c.put(0, [0, 1], whole)
    put_part(c, 0, c.chain(text(10)), 8, 10)
    state_id = put_part(c, 1, part, 4, 6)
    hit = c.paged.find_hit(whole)
    assert (hit.n_tokens, hit.n_common) == (6, 10)
    assert hit.blocks == ((full_ids[0], full_ids[1]), (0, state_id))


def test_o36_a_full_group_alone_hits_within_a_block():
    c = partial(full(4))
    c.put(0, [0, 1], c.chain(text(8)))
    put_part(c, 0, c.chain(text(10)), 8, 10)
    assert c.hit(text(12)).n_tokens == 10
    assert c.hit(text(9)).n_tokens == 8
    assert c.hit(text(8)).n_tokens == 6  # not all of it, so the block is used in part
    assert len(c.hit(text(8)).blocks[0]) == 2


def put_part(c, group, chain, start, end):
    """Makes tokens [start, end) of a chain findable in a block of a group."""
    (block,) = c.pool.take(1)
    b = c.paged.block_size
    c.pool.register(block, group, chain.part(start // b, (end - start) // b))
    return block


@pytest.mark.parametrize(
    ("whole", "part", "hit", "n_blocks"), [([0, 1], None, 6, 2), ([0], 6, 4, 1)]
)
def test_o36_a_draft_computes_the_last_hash_block_again(whole, part, hit, n_blocks):
    c = Cache([full(4)], 64, hash_block_size=2, partial=True, drafts=[0])
    chain = c.chain(text(12))
    c.put(0, whole, chain)
    if part is not None:
        put_part(c, 0, chain, 4, part)
    found = c.paged.find_hit(chain)
    assert (found.n_tokens, len(found.blocks[0])) == (hit, n_blocks)


def test_a_draft_computes_the_last_block_again():
    c = Cache([full(4), window(5, b=4)], 64, drafts=[0, 1])
    c.start("A", text(17))
    assert c.hit(text(17)).n_tokens == 12
    assert c.hit(text(16)).n_tokens == 8
    # The window needs one block before the end of the hit, and the one after it.
    found = c.hit(text(13))
    assert found.n_tokens == 8
    assert found.blocks[1] == (0, c.tables("A")[1][1])
    c.pool.forget([c.tables("A")[1][2]])
    assert c.hit(text(17)).n_tokens == 4

"""Cases of windows and chunks, by their numbers."""

import pytest
from paged_cases import Cache, chunked, full, text, window

from kvrt.paged.kinds import kind_of


def grow(c, name, settled, n_tokens, seed=7):
    """Makes room for n_tokens after `settled` were computed."""
    new = c.paged.allocate(name, n_tokens, n_settled=settled)
    assert new is not None
    return new


def nulls(table):
    return [i for i, block in enumerate(table) if not block]


def test_o15_a_window_frees_what_slid_out():
    c = Cache([window(4, b=2)], 12)
    c.start("A", text(22))
    (table,) = c.tables("A")
    assert len(table) == 11
    freed = {}
    for computed in (4, 5, 6, 7, 11):
        before, queue = c.tables("A")[0], c.pool.queue()
        grow(c, "A", computed, 22)
        gone = [i for i in nulls(c.tables("A")[0]) if before[i]]
        new = [b for b in c.pool.queue() if b not in queue]
        freed[computed] = [table.index(b) for b in new]
        assert sorted(gone) == sorted(freed[computed])
    assert freed == {4: [], 5: [0], 6: [], 7: [1], 11: [3, 2]}


def test_o17_chunks_are_freed_whole():
    c = Cache([chunked(4, b=2)], 12)
    c.start("A", text(22), read=False)
    for computed, n in ((4, 2), (6, 2), (12, 6)):
        grow(c, "A", computed, 22)
        assert nulls(c.tables("A")[0]) == list(range(n))
    m = kind_of(chunked(8, b=2), 2)
    assert [m.n_skipped(n) for n in (7, 8, 13)] == [0, 8, 8]


def test_o20_what_is_foretold_is_what_is_taken():
    # A window of 4 with 9 tokens in flight never holds more than 4 blocks of 4 tokens.
    c = Cache([window(4, b=4)], 12, n_in_flight=9, n_ctx=64)
    assert c.paged.n_peak(64) == (4,)
    for n in (4, 8, 12, 16):
        foretold = c.n_needed("A", n)
        new = c.paged.allocate("A", n, whole=64)
        assert tuple(map(len, new)) == foretold == (1,)
    assert c.n_needed("B", 16) == (4,)
    assert len(c.paged.allocate("B", 16)[0]) == 4


# --- the rules of lookup, over single tokens ------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "hit", "held"),
    [((), 14, {11, 12, 13}), ((12,), 6, {3, 4, 5}), ((12, 5), 5, {2, 3, 4})],
)
def test_a_window_needs_a_run_of_blocks(missing, hit, held):
    c = Cache([window(4, b=1)], 32)
    chain = c.chain(text(15))
    ids = c.put(0, {2, 3, 4, 5, 11, 12, 13} - set(missing), chain)
    found = c.paged.find_hit(chain)
    assert found.n_tokens == hit
    assert found.blocks == (tuple(ids[i] if i in held else 0 for i in range(hit)),)


def test_a_short_run_counts_if_it_begins_the_text():
    c = Cache([window(4, b=1)], 32)
    chain = c.chain(text(15))
    c.put(0, {0, 1, 3}, chain)
    assert c.paged.find_hit(chain).n_tokens == 2


def test_a_window_of_one_token_needs_nothing():
    c = Cache([full(4), window(1, b=4)], (32,))
    chain = c.chain(text(15))
    c.put(0, {0, 1}, chain)
    assert c.paged.find_hit(chain).blocks == ((1, 2), (0, 0))


def test_chunks_before_the_last_are_not_looked_up():
    c = Cache([chunked(8, b=2)], 32)
    chain = c.chain(text(15))
    assert c.paged.find_hit(chain).blocks == ((0, 0, 0, 0),)
    ids = c.put(0, {4, 6}, chain)
    assert c.paged.find_hit(chain).blocks == ((0, 0, 0, 0, ids[4]),)
    ids |= c.put(0, {5}, chain)
    assert c.paged.find_hit(chain).n_tokens == 14


def test_a_chunk_that_ends_where_no_hit_can_is_looked_up_from_its_beginning():
    c = Cache([full(8), chunked(6, b=2)], 32)
    chain = c.chain(text(25))
    c.put(0, {0, 1, 2}, chain)
    ids = c.put(1, {6, 7}, chain)
    # 24 begins a chunk; nothing is needed.
    assert c.paged.find_hit(chain).n_tokens == 24
    # Of 16 tokens, 12 to 15 lie in the chunk of the next one.
    assert c.hit(text(23)).blocks == ((1, 2), (0,) * 6 + (ids[6], ids[7]))
    c.pool.forget([ids[7]])
    # Of 8, 6 and 7 do, and are not there.
    assert c.hit(text(23)).n_tokens == 0
    c.put(1, {3}, chain)
    assert c.hit(text(23)).n_tokens == 8


def test_two_windows_and_a_bound_between_them():
    # The three-type trap: 7 looks like an answer after one pass over all.
    c = Cache([window(2, b=1), window(4, b=1)], 32)
    chain = c.chain(text(11))
    c.put(0, {2, 4, 7, 9}, chain)
    c.put(1, {1, 2, 3, 4, 5, 6}, chain)
    found = c.paged.find_hit(chain)
    assert (found.n_tokens, found.n_common) == (5, 10)


def test_a_bound_can_take_a_windows_hit_away():
    # The non-monotone trap: the window alone would hit 3 blocks.
    c = Cache([full(1), window(3, b=1)], 32)
    chain = c.chain(text(11))
    c.put(0, {0, 1}, chain)
    c.put(1, {1, 2}, chain)
    found = c.paged.find_hit(chain)
    assert (found.n_tokens, found.n_common) == (0, 2)


# --- how many blocks ------------------------------------------------------------------------------


def held(c):
    return c.pool.n_blocks - 1 - c.pool.n_free


@pytest.mark.parametrize(("chunk", "peak"), [(112, 21), (64, 17), (32, 14), (16, 13)])
def test_ten_full_and_twenty_windowed_layers(chunk, peak):
    # Two groups of ten windowed layers each beside the full one.
    c = Cache([full(), window(32), window(32)], 64, n_in_flight=chunk)
    seen, end = [], 0
    while end < 112:
        start, end = end, min(112, end + chunk)
        assert c.paged.allocate("A", end, n_settled=start) is not None
        seen.append(held(c))
    assert max(seen) == peak
    assert sum(c.paged.n_peak(112)) >= peak
    grow(c, "A", 112, 112)
    assert held(c) == 11
    assert [sum(map(bool, t)) for t in c.tables("A")] == [7, 2, 2]
    grow(c, "A", 112, 113)
    assert held(c) == 14


def test_a_draft_registers_nothing_for_a_hit_of_no_tokens():
    # Ends at multiples of 16: block 3 lies before token 16, block 4 is the one computed again.
    c = Cache([full(16), window(5, b=4)], (64,), drafts=[1])
    c.start("A", text(40))
    assert c.registered("A", 1) == [3, 4, 7, 8]
    m = kind_of(window(5, b=4), 16, drafts=True)
    assert [i for i in range(6) if m.serves_hit(i, 16, ())] == [3, 4]


def test_a_whole_prompt_keeps_one_end_more_than_vllm_does():
    # A prompt of two segments: asked again it hits up to 16, gone on from up to 32.
    for n, kept in ((32, [3, 7]), (31, [3])):
        c = Cache([full(16), window(5, b=4)], (64,), checkpoint_interval=0)
        c.start("A", text(n))
        assert c.registered("A", 1) == kept

"""Where chunks end for recurrent layers: the worked cases, and what holds of every cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrt.serving.cache.checkpoints.chunk_ends import ChunkEnds


def ends(
    cuts: ChunkEnds, n_prompt: int, *, start: int = 0, kept: tuple[int, ...] = ()
) -> list[int]:
    """Where the chunks of a prompt end."""
    found = []
    while start < n_prompt:
        n = min(n_prompt - start, cuts.n_chunk)
        start += cuts.fit(start, n, n_prompt=n_prompt, n_tokens=n_prompt, kept=kept)
        found.append(start)
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [8192, 9728, 9984, 10000]),  # O37
        ({"hash_size": None}, [8192, 9728, 10000]),
        ({"n_drop": 1}, [8192, 9216, 9984, 10000]),
    ],
)
def test_a_prompt_of_10000_tokens(options, expected):
    cuts = ChunkEnds(**{"block_size": 512, "hash_size": 32, "n_chunk": 8192, **options})
    assert ends(cuts, 10_000) == expected


def test_a_prompt_resumed_inside_a_block():
    # O37: from 9984, 256 tokens to the next boundary, then a block of 512.
    cuts = ChunkEnds(block_size=512, hash_size=32, n_chunk=512)
    assert ends(cuts, 12_000, start=9984)[:2] == [10_240, 10_752]


def test_the_end_of_a_shared_prefix_is_a_stop_at_the_block_below_it():
    cuts = ChunkEnds(block_size=512, hash_size=None, n_chunk=8192)
    assert ends(cuts, 10_000, kept=(3000,)) == [2560, 9728, 10000]
    # Borders of messages, rounded down, and every interval; what lies behind is as before.
    assert ends(cuts, 10_000, kept=(3000, 700)) == [512, 2560, 9728, 10000]
    cuts = ChunkEnds(block_size=512, hash_size=None, n_chunk=8192, interval=4096)
    assert ends(cuts, 10_000) == [4096, 8192, 9728, 10000]


def test_a_block_wider_than_any_chunk_is_filled_in_pieces():
    cuts = ChunkEnds(block_size=512, hash_size=None, n_chunk=200)
    assert ends(cuts, 1100) == [200, 400, 512, 712, 912, 1024, 1100]


def test_tokens_that_are_sampled_are_not_cut():
    cuts = ChunkEnds(block_size=4, hash_size=2, n_chunk=8)
    assert cuts.fit(9, 1, n_prompt=9, n_tokens=10) == 1


def test_a_sample_that_is_computed_again_is_cut_as_one_prompt():
    # 9 of 30 tokens were given; all are computed again but the last, which decodes.
    cuts = ChunkEnds(block_size=8, hash_size=None, n_chunk=12)
    assert [cuts.fit(s, 12, n_prompt=9, n_tokens=30) for s in (0, 8, 16)] == [8, 8, 8]
    assert cuts.fit(24, 6, n_prompt=9, n_tokens=30) == 6


@given(
    st.integers(1, 40),
    st.sampled_from([None, 1, 2, 4]),
    st.integers(0, 1),
    st.integers(1, 200),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_every_cut_gets_on_and_stops_at_what_can_be_kept(size, part, drop, n_prompt, rooms):
    hash_size = None if part is None else max(size // part, 1)
    cuts = ChunkEnds(block_size=size, hash_size=hash_size, n_chunk=60, n_drop=drop)
    start, seen, turn = 0, set(), 0
    while start < n_prompt:
        n = min(n_prompt - start, rooms[turn % len(rooms)])
        cut = cuts.fit(start, n, n_prompt=n_prompt, n_tokens=n_prompt)
        assert 1 <= cut <= n
        start += cut
        seen.add(start)
        turn += 1
    # The last boundary is never run over, however odd the room in each step was.
    assert (n_prompt // size - drop) * size in seen | {0} or n_prompt // size <= drop

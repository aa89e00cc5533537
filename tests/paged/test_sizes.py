"""Numbers of blocks: what sequences need, and how many a pool has of some bytes."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from layer_lists import U, attention, fulls_and_windows, interleaved, state
from plan_sizes import blocks_in_use, for_budget, for_sequences, plan_bytes

from kvrt.errors import BadConfig
from kvrt.paged.layout.groups import group_layers
from kvrt.paged.layout.sizing import for_tokens, most_blocks
from kvrt.paged.layout.spec import PagedGroup


def group(kind, size=0, block_size=16):
    target = 0 if kind == "shared" else None
    return PagedGroup(kind=kind, layers=(0,), block_size=block_size, size=size, target=target)


def peak_by_steps(groups, n_tokens, n_step):
    """The most blocks of all groups at once while a prompt comes in, so many tokens a step."""
    steps = [(n, min(n + n_step, n_tokens)) for n in range(0, n_tokens, n_step)]
    return max(sum(blocks_in_use(g, *step) for g in groups) for step in steps)


@pytest.mark.parametrize("n_step, peak", [(112, 21), (64, 17), (32, 14), (16, 13)])
def test_the_documents_model_peaks_by_the_size_of_its_steps(n_step, peak):
    """10 full and 20 windowed layers, window 32, blocks of 16, 112 tokens: 11 blocks in the end."""
    groups = group_layers(interleaved(30, 3, 32)).groups
    assert sum(blocks_in_use(g, 112, 112) for g in groups) == 7 + 2 + 2
    assert sum(blocks_in_use(g, 112, 113) for g in groups) == 8 + 3 + 3
    assert peak_by_steps(groups, 112, n_step) == peak


@pytest.mark.parametrize(
    "kind, size, n_tokens, n_inflight, blocks",
    [
        ("full", 0, 512, 128, 32),
        # O30: a window of 64 and steps of 128 need 13 blocks of 16, of 32 without the cap.
        ("window", 64, 512, 128, 13),
        ("window", 64, 40, 128, 3),
        ("chunked", 64, 512, 128, 12),
        ("chunked", 40, 512, 16, 4),
        ("chunked", 40, 512, 17, 5),
        ("recurrent", 0, 512, 128, 2),
        ("recurrent", 0, 16, 128, 1),
        ("shared", 0, 512, 128, 0),
    ],
)
def test_the_most_blocks_of_a_sequence(kind, size, n_tokens, n_inflight, blocks):
    assert most_blocks(group(kind, size), n_tokens, 1, n_inflight) == blocks


@settings(max_examples=300)
@given(
    kind=st.sampled_from(["full", "window", "chunked"]),
    size=st.integers(1, 40),
    block_size=st.integers(1, 9),
    steps=st.lists(st.integers(1, 12), min_size=1, max_size=12),
)
def test_no_sequence_of_steps_needs_more_than_its_peak(kind, size, block_size, steps):
    g = group(kind, 0 if kind == "full" else size, block_size)
    n, most = 0, 0
    for step in steps:
        most = max(most, blocks_in_use(g, n, n + step))
        n += step
    assert most <= most_blocks(g, n, 1, max(steps))
    assert kind != "full" or most == most_blocks(g, n, 1, max(steps))


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    share=st.integers(1, 40),
    window=st.integers(1, 40),
    chunk=st.integers(1, 40),
)
def test_tokens_fit_however_sequences_divide_them(lengths, share, window, chunk):
    """All sequences at once, each with room for its share of the step."""
    layers = [attention(0), attention(1, "window", window), attention(2, "chunked", chunk)]
    layout = group_layers([*layers, state(3, (4,))])
    n_seq = len(lengths)
    plan = for_tokens(layout, n_tokens=sum(lengths), n_seq=n_seq, n_inflight=n_seq * share)
    needs = [0, 0]
    for g in layout.groups:
        needs[g.pool] += sum(blocks_in_use(g, max(0, n - share), n) for n in lengths)
    assert all(n <= p.n_blocks - 1 for n, p in zip(needs, plan.pools, strict=True))


def test_blocks_for_sequences_are_their_peaks():
    layout = group_layers([*fulls_and_windows(1, 1, 64), state(2, (5,))])
    plan = for_sequences(layout, n_ctx=512, n_seq=3, n_inflight=128)
    assert [p.n_blocks for p in plan.pools] == [1 + 3 * (32 + 13), 1 + 3 * 2]
    assert plan_bytes(plan) == 136 * U + 7 * 20


def test_a_budget_of_one_pool_is_used_to_the_last_block():
    """O38 to O40, O42: 32 or 64 blocks, the null block counted."""
    for layers, n_bytes, n_blocks in [
        (fulls_and_windows(2, 0), 2 * U * 32, 32),
        (fulls_and_windows(0, 2), 2 * U * 32, 32),
        (fulls_and_windows(1, 1), 2 * U * 32, 64),
        (fulls_and_windows(2, 4), 2 * U * 32, 32),
        (fulls_and_windows(6, 5), 6 * U * 32, 32),
    ]:
        layout = group_layers(layers)
        for n_ctx in (16, 96):
            for spare in (0, layout.pools[0].block_bytes - 1):
                plan = for_budget(layout, n_bytes=n_bytes + spare, n_ctx=n_ctx, n_inflight=16)
                assert [p.n_blocks for p in plan.pools] == [n_blocks]


@pytest.mark.parametrize("name", ["n_tokens", "n_seq", "n_inflight"])
def test_numbers_below_one_are_refused(name):
    numbers = dict(n_tokens=8, n_seq=1, n_inflight=1) | {name: 0}
    with pytest.raises(BadConfig, match=f"{name} is 0; it must be at least 1"):
        for_tokens(group_layers([attention(0)]), **numbers)

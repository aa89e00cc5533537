"""One page size for all layers: vLLM's own configurations, and what its padding costs."""

import pytest
from layer_lists import U, attention, fulls_and_windows, state
from plan_sizes import for_budget, for_sequences, plan_bytes

from kvrt.errors import BadConfig
from kvrt.paged.layout.groups import group_layers
from kvrt.paged.layout.unified import aligned_block_size, unify


def blocks(layout, n_bytes):
    plan = for_budget(layout, n_bytes=n_bytes, n_ctx=16, n_inflight=1)
    return plan.pools[0].n_blocks


def padding_bytes(layout):
    """Of one block of every group."""
    return sum(map(layout.padding_bytes, range(len(layout.groups))))


def test_one_kind_of_layers_is_one_group():
    """O38: 2 full layers in 2u * 32 are 32 blocks, a tensor of 32u each; 2 windowed ones too."""
    for layers in (fulls_and_windows(2, 0), fulls_and_windows(0, 2)):
        found = unify(layers)
        assert [g.layers for g in found.groups] == [(0, 1)]
        assert blocks(found, 2 * U * 32) == 32
        assert [32 * page for page in found.pools[0].page_bytes] == [32 * U, 32 * U]


def test_two_kinds_share_their_buffers():
    """O39: 64 blocks of one tensor."""
    found = unify(fulls_and_windows(1, 1))
    assert [(g.kind, g.layers) for g in found.groups] == [("full", (0,)), ("window", (1,))]
    assert (blocks(found, 2 * U * 32), found.pools[0].page_bytes) == (64, (U,))


@pytest.mark.parametrize("n_full, n_window", [(2, 4), (6, 5), (10, 20), (13, 12)])
def test_equal_pages_are_grouped_as_in_a_pool_of_one_shape(n_full, n_window):
    """O40, O42."""
    layers = fulls_and_windows(n_full, n_window)
    found, own = unify(layers), group_layers(layers)
    assert found == own
    assert padding_bytes(found) == own.n_padding * U


def test_layers_of_one_kind_and_several_widths_have_buffers_of_their_own_sizes():
    """O43: heads of 128 and 64 channels in 3u * 32 are tensors of 64u and 32u."""
    found = unify([attention(0, head_dim=128), attention(1)])
    assert [g.layers for g in found.groups] == [(0, 1)]
    n = blocks(found, 3 * U * 32)
    assert [n * page for page in found.pools[0].page_bytes] == [64 * U, 32 * U]
    assert padding_bytes(found) == 0


def test_smaller_pages_grow_to_the_greatest():
    """O44: half as wide, blocks of 32 tokens instead of 16."""
    found = unify([attention(0), attention(1, "window", 32, head_dim=32)])
    assert [g.block_size for g in found.groups] == [16, 32]
    assert blocks(found, U * 32) == 32


def test_pages_that_do_not_divide_each_other_are_refused():
    """O44: 64 and 96 channels; pools by shape hold both."""
    layers = [attention(0), attention(1, "window", 32, head_dim=96)]
    with pytest.raises(BadConfig, match=f"a page of {3 * U // 2} bytes is no multiple of the {U}"):
        unify(layers)
    assert len(group_layers(layers).pools) == 2


def test_the_odd_ends():
    """O45: no layers; a number of blocks given; block sizes that differ; equal windows."""
    none = unify([])
    assert (none.groups, blocks(none, 10**6)) == ((), 1)
    assert unify(fulls_and_windows(2, 0)).plan([16]).pools[0].n_blocks == 16

    differ = unify([attention(0), attention(1, block_size=32)])
    assert [(g.layers, g.block_size) for g in differ.groups] == [((0, 1), 32)]
    assert differ.pools[0].page_bytes == (2 * U, 2 * U)

    uniform = unify([attention(0, "window", 32), attention(1, "window", 32, n_kv_heads=8)])
    assert [g.layers for g in uniform.groups] == [(0, 1)]
    assert uniform.pools[0].page_bytes == (U, 2 * U)
    windows = unify([attention(0, "window", 32), attention(1, "window", 64)])
    assert len(windows.groups) == 2


@pytest.mark.parametrize(
    "alignment, tokens, page, percent", [(16, 272, 1_114_112, 3.8), (256, 512, 2_097_152, 95.4)]
)
def test_blocks_of_attention_grow_until_they_hold_a_state(alignment, tokens, page, percent):
    """2.4: a state of 1,073,152 bytes and 4,096 bytes a token of attention."""
    assert aligned_block_size(1_073_152, 4096, alignment) == tokens
    layers = [attention(0, n_kv_heads=8, head_dim=128), state(1, (1_073_152 // 4,))]
    found = unify(layers, alignment=alignment)
    assert [g.block_size for g in found.groups] == [tokens, tokens]
    assert (found.pools[0].page_bytes, found.filling) == ((page,), {1: page - 1_073_152})
    assert round(100 * padding_bytes(found) / 1_073_152, 1) == percent
    pools = group_layers(layers)
    assert [g.block_size for g in pools.groups] == [16, 16]
    assert [p.block_bytes for p in pools.pools] == [16 * 4096, 1_073_152]


def test_states_without_alignment_set_the_page():
    layers = [attention(0), state(1, (U,))]
    found = unify(layers)
    assert (found.pools[0].page_bytes, [g.block_size for g in found.groups]) == ((4 * U,), [64, 16])
    with pytest.raises(BadConfig, match="is no multiple of"):
        unify([attention(0), state(1, (U + 1,))])


def test_shared_layers_have_no_page():
    layers = [*fulls_and_windows(1, 1), attention(2, "window", 32, shares=1)]
    found = unify(layers)
    assert [g.kind for g in found.groups] == ["full", "window", "shared"]
    assert found.pools[0].page_bytes == (U,)
    assert found.buffers[2] == 0 and 2 not in found.filling


def test_one_pool_of_pages_costs_more_than_a_pool_a_shape():
    """4 full layers and 28 states of 19,456 bytes: a page of 32 tokens pads each by 68 %."""
    layers = [attention(i) if i % 8 == 4 else state(i, (3, 256), (256, 16)) for i in range(32)]
    unified = unify(layers, alignment=16)
    assert (unified.pools[0].page_bytes, unified.filling[0]) == ((32768,) * 4, 32768 - 19456)
    many = dict(n_ctx=64, n_seq=8, n_inflight=64)
    found = [plan_bytes(for_sequences(x, **many)) for x in (group_layers(layers), unified)]
    pools = (1 + 8 * 4) * 4 * U + (1 + 8 * 2) * 28 * 19456
    assert found == [pools, (1 + 8 * (2 + 7 * 2)) * 4 * 32768]
    assert found[1] > 1.2 * found[0]

"""How layers become groups and pools, against vLLM's own numbers and its design document's."""

import dataclasses

import pytest
from layer_lists import U, attention, fulls_and_windows, interleaved, state

from kvrt.config import GroupSpec, MaskSpec, RecurrentSpec
from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.paged.layout.groups import group_layers, group_size, layer_caches
from kvrt.paged.layout.spec import PagedGroup, PoolSpec
from kvrt.paged.layout.unified import unify


def shown(layout):
    return [(g.kind, g.size, g.layers) for g in layout.groups]


# counts, vLLM's size, groups and padding layers with it, our size.
SIZES = [
    ((10, 20), 10, 3, 0, 10),
    ((10, 52), 10, 7, 8, 10),
    ((13, 12), 13, 2, 1, 13),
    ((6, 5), 6, 2, 1, 6),
    ((3, 7), 3, 4, 2, 3),
    ((3, 4), 4, 2, 1, 4),
    ((4, 6), 4, 3, 2, 2),
    ((20, 30), 20, 3, 10, 10),
    ((10, 14), 14, 2, 4, 5),
    ((7,), 7, 1, 0, 7),
    ((1, 20), 1, 21, 0, 1),
]


@pytest.mark.parametrize("counts, size, n_groups, n_padding, ours", SIZES)
def test_sizes_of_groups(counts, size, n_groups, n_padding, ours):
    assert group_size(counts, "reference") == size
    assert sum(-(-c // size) for c in counts) == n_groups
    assert sum(-c % size for c in counts) == n_padding
    assert group_size(counts) == ours
    assert max(-c % ours / c for c in counts) <= max(-c % size / c for c in counts)
    if len(counts) == 2:
        layout = unify(fulls_and_windows(*counts))
        assert (len(layout.groups), layout.n_padding) == (n_groups, n_padding)


def test_the_toy_model_of_the_document_is_one_group():
    layout = group_layers([attention(i) for i in range(4)])
    assert shown(layout) == [("full", 0, (0, 1, 2, 3))]
    assert layout.pools[0].block_bytes == 4 * U


def test_a_full_and_a_windowed_layer_share_one_buffer():
    """O39: one buffer for both, two groups; without windows one group of two buffers."""
    layout = group_layers(fulls_and_windows(1, 1))
    assert shown(layout) == [("full", 0, (0,)), ("window", 32, (1,))]
    assert [(p.n_buffers, p.block_bytes) for p in layout.pools] == [(1, U)]
    assert layout.buffers == {0: 0, 1: 0}


def test_windowed_layers_are_dealt_to_their_groups_in_turn():
    """O40, its layers counted from 1: groups (1, 2), (3, 5), (4, 6); buffers of 1 3 4 and 2 5 6."""
    layout = group_layers(fulls_and_windows(2, 4))
    assert [g.layers for g in layout.groups] == [(0, 1), (2, 4), (3, 5)]
    assert layout.buffers == {0: 0, 2: 0, 3: 0, 1: 1, 4: 1, 5: 1}
    assert layout.plan([32]).pools == (PoolSpec(n_blocks=32, n_buffers=2, block_bytes=2 * U),)


def test_a_group_that_is_a_layer_short_is_padded():
    """O42: 6 full and 5 windowed layers; the last buffer holds layer 6 of the first group alone."""
    layout = group_layers(fulls_and_windows(6, 5))
    assert [len(g.layers) for g in layout.groups] == [6, 5]
    assert (layout.pools[0].n_buffers, layout.n_padding) == (6, 1)
    assert [layer for layer, i in layout.buffers.items() if i == 5] == [5]


def test_ten_full_and_twenty_windowed_layers_are_three_groups():
    layout = group_layers(interleaved(30, 3, 32))
    assert [(g.kind, len(g.layers)) for g in layout.groups] == [("window", 10)] * 2 + [("full", 10)]
    assert (layout.groups[0].layers[:3], layout.n_padding) == ((0, 3, 6), 0)


def test_gemma_3_27b_has_eight_padding_layers():
    layout = group_layers(interleaved(62, 6, 1024))
    by_kind = {k: [len(g.layers) for g in layout.groups if g.kind == k] for k in ("full", "window")}
    assert by_kind == {"full": [10], "window": [9, 9, 9, 9, 8, 8]}
    assert (layout.pools[0].n_buffers, layout.n_padding) == (10, 8)
    assert sorted(i for g in layout.groups for i in g.layers) == list(range(62))


def test_rows_of_another_shape_are_a_pool_of_their_own():
    """O43 and O44 without their errors: heads of 128, 64 and 96 channels never share an array."""
    layers = [attention(0, head_dim=128), attention(1), attention(2, "window", 8, head_dim=96)]
    layout = group_layers(layers)
    assert [(g.pool, g.layers) for g in layout.groups] == [(0, (0,)), (1, (1,)), (2, (2,))]
    assert [p.block_bytes for p in layout.pools] == [2 * U, U, 3 * U // 2]
    halves = group_layers([attention(0), attention(1, type_v="f32")])
    assert [p.block_bytes for p in halves.pools] == [U, 3 * U // 2]


def test_windows_of_two_sizes_are_two_kinds_of_one_pool():
    layout = group_layers([attention(0, "window", 8), attention(1, "window", 64), attention(2)])
    assert len(layout.pools) == 1
    assert shown(layout) == [("window", 8, (0,)), ("window", 64, (1,)), ("full", 0, (2,))]


def test_states_are_a_pool_of_their_own_however_large():
    """The case of 2.4: no block of attention grows to the size of a state."""
    layers = [state(0, (3, 64), (64, 16)), attention(1), state(2, (3, 64), (64, 16))]
    layout = group_layers(layers)
    assert [(g.kind, g.layers, g.pool) for g in layout.groups] == [
        ("recurrent", (0, 2), 0),
        ("full", (1,), 1),
    ]
    assert layout.pools[0].block_bytes == 2 * 4 * (3 * 64 + 64 * 16)
    assert layout.pools[1].block_bytes == U


def test_layers_that_share_rows_have_no_bytes():
    """Of six layers the last three read: two the third's window, one the second's full rows."""
    own = [attention(0, "window", 8), attention(1), attention(2, "window", 8)]
    readers = [
        attention(3, "window", 8, shares=2),
        attention(4, shares=1),
        attention(5, "window", 8, shares=2),
    ]
    alone, layout = group_layers(own), group_layers(own + readers)
    assert layout.pools == alone.pools
    assert layout.groups[: len(alone.groups)] == alone.groups
    found = [(g.kind, layout.groups[g.target].layers, g.layers) for g in layout.groups[-2:]]
    assert found == [("shared", (2,), (3, 5)), ("shared", (1,), (4,))]
    assert all(layout.buffers[x.layer] == layout.buffers[x.shares] for x in readers)
    # A windowed layer may read rows that are kept for longer than it needs.
    assert group_layers([attention(0), attention(1, "window", 8, shares=0)]).groups[
        1
    ] == PagedGroup(kind="shared", layers=(1,), block_size=16, target=0)


@pytest.mark.parametrize(
    "layers, found",
    [
        ([attention(0), attention(0)], "1 layers occur twice"),
        ([attention(0, shares=7)], "layer 0 shares keys and values of layer 7, which keeps none"),
        ([attention(0), attention(1, shares=0), attention(2, shares=1)], "keeps none"),
        ([attention(0), attention(1, shares=0, head_dim=32)], "keeps others of another shape"),
        (
            [attention(0, "window", 8), attention(1, shares=0)],
            "frees those that it would still see",
        ),
        ([state(0, (4,)), attention(1, shares=0)], "keeps others of another shape"),
        ([attention(0, head_dim=0)], "layer 0 keeps nothing"),
        ([state(0)], "layer 0 keeps nothing"),
    ],
)
def test_layers_that_no_plan_can_hold_are_refused(layers, found):
    with pytest.raises(BadConfig, match=found):
        group_layers(layers)


def test_no_layers_are_no_groups():
    layout = group_layers([])
    assert (layout.groups, layout.pools, layout.n_padding) == ((), (), 0)


SPECS = (
    GroupSpec(layers=(1, 3), n_kv_heads=2, head_dim=8, rope=None),
    GroupSpec(
        layers=(0,), n_kv_heads=2, head_dim=8, rope=None, mask=MaskSpec(kind="window", size=6)
    ),
    GroupSpec(
        layers=(4,), n_kv_heads=2, head_dim=8, rope=None, mask=MaskSpec(kind="chunked", size=4)
    ),
)


def test_layers_come_from_what_a_model_says_of_itself():
    config = CacheConfig(block_size=32, type_k="bf16", type_v="f32")
    recurrent = RecurrentSpec(layers=(2,), shapes=((3, 4), (5,)))
    layers = layer_caches(SPECS, recurrent, config)
    assert [x.layer for x in layers] == [0, 1, 2, 3, 4]
    assert [(x.kind, x.size) for x in layers] == [
        ("window", 6),
        ("full", 0),
        ("recurrent", 0),
        ("full", 0),
        ("chunked", 4),
    ]
    assert layers[0].block_bytes == 32 * 2 * 8 * (2 + 4)
    assert layers[2].block_bytes == 4 * (12 + 5)


def test_windows_that_keep_all_their_rows_count_as_full():
    whole = layer_caches(SPECS, None, CacheConfig(swa_full=True))
    assert {x.kind for x in whole} == {"full"}
    group = GroupSpec(layers=(0,), n_kv_heads=1, head_dim=8, rope=None)
    symmetric = dataclasses.replace(group, mask=MaskSpec(kind="symmetric", size=6))
    assert layer_caches([symmetric], None, CacheConfig())[0].kind == "full"


def test_windows_with_other_sinks_have_tables_of_their_own():
    masks = [MaskSpec(kind="window", size=6, n_sink=n) for n in (0, 2, 2)]
    specs = [
        GroupSpec(layers=(i,), n_kv_heads=1, head_dim=8, rope=None, mask=mask)
        for i, mask in enumerate(masks)
    ]
    found = group_layers(layer_caches(specs, None, CacheConfig())).groups
    assert {(g.n_sink, g.layers) for g in found} == {(0, (0,)), (2, (1,)), (2, (2,))}


def test_bytes_of_a_block():
    """2.1: 16 tokens of 8 heads of 128 channels in bf16."""
    assert attention(0, n_kv_heads=8, head_dim=128).block_bytes == 65_536
    assert attention(0, type_k="f16", type_v="f32").block_bytes == 16 * 4 * 64 * 6

"""Which blocks a step reads of a group: those of its window, whether all cells are kept or not."""

import dataclasses

import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec
from kvrt.cellcache.indexed_group import IndexedGroup
from kvrt.cells.slots import one_sequence

NO_SLOTS = np.zeros(0, np.int32)
MASKS = {
    "window": MaskSpec(kind="window", size=9),
    "chunked": MaskSpec(kind="chunked", size=12),
    "sinks": MaskSpec(kind="window", size=9, n_sink=2),
    "full": MaskSpec(),
}


def filled(mask, n, step=4, **config):
    """A group with one sequence, n tokens in blocks of 4 cells."""
    spec = GroupSpec(layers=(0,), n_kv_heads=1, head_dim=8, rope=None, mask=mask)
    sizes = {"n_ctx": 64, "n_seq_max": 1, "block_size": 4, "n_ubatch": 4} | config
    group = IndexedGroup(spec, CacheConfig(**sizes))
    for start in range(0, n, step):
        pos = np.arange(start, min(start + step, n), dtype=np.int32)
        seq_ids = np.zeros(len(pos), np.int32)
        group.append(group.find(seq_ids, {0: start}), pos, seq_ids)
    return group


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("window", [32, 36]),
        ("chunked", [36]),
        ("sinks", [*range(0, 40, 4)]),
        ("full", [*range(0, 40, 4)]),
    ],
)
def test_a_token_reads_the_blocks_of_its_window(kind, wanted, swa_full):
    group = filled(MASKS[kind], 40, swa_full=swa_full)
    assert group.group.rolls == (kind in ("window", "chunked") and not swa_full)
    places = filled(MASKS[kind], 3, swa_full=swa_full).places(NO_SLOTS, one_sequence([0], 0, 3, 8))
    assert places.blocks[: places.n_blocks].tolist() == [0]
    step = one_sequence([0], 0, 40, 8)
    places = group.places(NO_SLOTS, step)
    blocks = places.blocks[: places.n_blocks]
    pos = group.cells.pos.reshape(-1, 4)[blocks]
    assert [x[x >= 0].min() for x in pos] == wanted
    slots = group.find(np.zeros(1, np.int32), {0: 40}).slots[:1]
    ahead = group.places(slots, dataclasses.replace(step, cached_early=True))
    assert set(ahead.blocks[: ahead.n_blocks].tolist()) == {*blocks.tolist(), int(slots[0]) // 4}

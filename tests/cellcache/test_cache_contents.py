"""Edits of all groups at once."""

import dataclasses

import numpy as np

from kvrt import MaskSpec
from kvrt.cellcache import contents
from kvrt.cellcache import group as groups
from kvrt.cellcache.contents import CacheContents
from kvrt.cells import Shift
from kvrt.sizes import Extent


def shared(n_cells, mask, n):
    """A group in which two sequences share the newest n positions of 8."""
    rolls = mask.kind != "full"
    group = groups.open_group(Extent(n_cells=n_cells, block_size=n_cells, rolls=rolls), mask, 2)
    pos, seqs = group.cells.pos.copy(), group.cells.seqs.copy()
    pos[:n], seqs[:n] = np.arange(8 - n, 8), 0b11
    return dataclasses.replace(
        group,
        cells=dataclasses.replace(group.cells, pos=pos, seqs=seqs),
        head=n,
        lost={s: ((0, 8 - n),) for s in (0, 1)} if rolls else {},
    )


def test_each_group_copies_as_many_shared_rows_as_it_has():
    window = MaskSpec(kind="window", size=3)
    held = CacheContents(groups=(shared(20, MaskSpec(), 8), shared(16, window, 5)))
    moved, copies = contents.apply(held, Shift(seq_id=1, d=8))
    assert [len(src) for src, _ in copies] == [8, 5]
    for group, n in zip(moved.groups, (8, 5), strict=True):
        assert sorted(group.cells.pos[group.cells.seqs[:, 0] == 0b01]) == list(range(8 - n, 8))
        assert sorted(group.cells.pos[group.cells.seqs[:, 0] == 0b10]) == list(range(16 - n, 16))

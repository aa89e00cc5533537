"""A group's sequences in blocks: how they get there, and how their new tokens find cells."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import blocks
from kvrt.cellcache.blocks import Blocks, CellCopies
from kvrt.cellcache.group import CellGroup, FoundSlots


def group_to_blocks(group: CellGroup, seq_id: int, size: int) -> tuple[CellGroup, CellCopies]:
    """The group with a sequence in blocks of `size` cells, and the cells to copy first.

    A rolling group stays as it is, for its cells are used again one by one.

    Raises:
      CacheFull: too few blocks are empty.
      UsageError: the sequence has a position twice.
    """
    known = group.blocks or Blocks(size=size, seqs=frozenset())
    if group.rolls or seq_id in known.seqs:
        return group, blocks.no_copies()
    cells, copies = blocks.arrange(group.cells, seq_id, known)
    known = dataclasses.replace(known, seqs=known.seqs | {seq_id})
    return dataclasses.replace(group, cells=cells, blocks=known), copies


def group_copy_on_write(
    group: CellGroup, seq_ids: Int32[np.ndarray, " n"], first: Mapping[int, int]
) -> tuple[CellGroup, CellCopies]:
    """The group with the blocks that tokens need of their own; see `blocks.leave_shared_blocks`.

    Args:
      group: the group.
      seq_ids: sequence of each token.
      first: by sequence, the position of its first token.

    Raises:
      CacheFull: the tokens do not fit.
    """
    if group.blocks is None:
        return group, blocks.no_copies()
    n = {s: int(np.count_nonzero(seq_ids == s)) for s in first}
    wanted = {s: (p, p + n[s]) for s, p in first.items()}
    cells, copies = blocks.leave_shared_blocks(group.cells, group.blocks, wanted)
    new = dataclasses.replace(group, cells=cells) if len(copies[0]) else group
    find_in_blocks(new, seq_ids, first)
    return new, copies


def find_in_blocks(
    group: CellGroup, seq_ids: Int32[np.ndarray, " n"], first: Mapping[int, int]
) -> FoundSlots:
    """As `group.find`, where sequences lie in blocks; after `group_copy_on_write`."""
    assert group.blocks is not None, "all lie in cells"
    pos = np.empty(len(seq_ids), np.int32)
    for s, p in first.items():
        here = seq_ids == s
        pos[here] = np.arange(p, p + np.count_nonzero(here), dtype=np.int32)
    found = blocks.plan_in_blocks(group.cells, group.blocks, group.head, seq_ids, pos)
    return FoundSlots(slots=found, group=group)

"""What a checkpoint keeps of each group, and a sequence cut back to one: plans only."""

import dataclasses

import numpy as np

from kvrt.cellcache import group as groups
from kvrt.cellcache import history, insert, recurrent
from kvrt.cellcache.checkpoint import checkpoints
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.saved import SavedCells
from kvrt.cells.cells import owned, owner_bits
from kvrt.cells.edits import Remove


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewindPlan:
    """A sequence cut back to a checkpoint.

    Attributes:
      contents: the contents afterwards.
      slots: by group, int32, the cell of each cell of its tail; None where nothing is written.
      state: the index that the state goes to; None without recurrent layers.
    """

    contents: CacheContents
    slots: tuple[np.ndarray | None, ...]
    state: int | None


def tail(group: CellGroup, seq_id: int) -> SavedCells | None:
    """The cells that a sequence's next token sees, as those of sequence 0.

    None where the group keeps every position. No change of positions may be pending.
    """
    if not group.rolls:
        return None
    cells = group.cells
    mine = np.flatnonzero(owned(cells, seq_id)).astype(np.int32)
    pos = np.asarray(cells.pos)[mine]
    seqs = np.repeat(np.asarray(owner_bits(cells, 0))[None], len(mine), axis=0)
    seen, lost = insert.seen(group, pos, seqs, {0: group.lost.get(seq_id, ())})
    return SavedCells(
        n_cells=len(cells.pos),
        head=group.head,
        index=mine[seen],
        pos=pos[seen],
        seqs=seqs[seen],
        lost={s: x for s, x in lost.items() if x},
    )


def plan_rewind(before: CacheContents, seq_id: int, checkpoint: Checkpoint) -> RewindPlan:
    """Plans to cut a sequence back to one of its checkpoints.

    The cells of its windows are given back and taken anew: where no other sequence has cells in a
    group each token gets the cell that it had, so that later steps give the same bits.

    Raises:
      CacheFull: other sequences leave a group too few cells.
    """
    edit = Remove(seq_id=seq_id, p0=checkpoint.pos)
    new, slots = [], []
    for group, kept in zip(before.groups, checkpoint.tails, strict=True):
        if kept is None:
            new.append(groups.apply(group, edit)[0])
            slots.append(None)
            continue
        empty, _ = groups.apply(group, Remove(seq_id=seq_id))
        group, where = insert.into_group(empty, kept, {0: seq_id})
        new.append(group)
        slots.append(where)
    states, index = before.states, None
    if states is not None:
        states = recurrent.apply(states, Remove(seq_id=seq_id))
        newest = ((checkpoint.pos - 1, 0),)
        states, indices = insert.into_states(states, {0: newest}, {0: seq_id})
        index = indices[0]
    after = CacheContents(
        groups=tuple(new),
        states=states,
        history=history.apply(before.history, edit),
        checkpoints=checkpoints.apply(before.checkpoints, edit, joins=False),
    )
    return RewindPlan(contents=after, slots=tuple(slots), state=index)

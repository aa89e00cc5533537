"""What a checkpoint keeps of each group, and a sequence cut back to one: plans only."""

import numpy as np

from kvrt.cellcache import group as groups
from kvrt.cellcache import history, insert, recurrent
from kvrt.cellcache.checkpoint import checkpoints
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.insert import InsertPlan
from kvrt.cellcache.saved import SavedCells, one_owner
from kvrt.cells.cells import owned
from kvrt.cells.edits import Remove


def tail(group: CellGroup, seq_id: int) -> SavedCells | None:
    """The cells that a sequence's next token sees, as those of sequence 0.

    None where the group keeps every position. No change of positions may be pending.
    """
    if not group.rolls:
        return None
    cells = group.cells
    mine = np.flatnonzero(owned(cells, seq_id)).astype(np.int32)
    pos = np.asarray(cells.pos)[mine]
    seqs = one_owner(len(mine), 0)
    seen, lost = insert.seen(group, pos, seqs, {0: group.lost.get(seq_id, ())})
    return SavedCells(
        n_cells=len(cells.pos),
        head=group.head,
        index=mine[seen],
        pos=pos[seen],
        seqs=seqs[seen],
        lost={s: x for s, x in lost.items() if x},
    )


def plan_rewind(before: CacheContents, seq_id: int, checkpoint: Checkpoint) -> InsertPlan:
    """Plans to cut a sequence back to one of its checkpoints.

    The cells of its windows are given back and taken anew: where no other sequence has cells in a
    group each token gets the cell that it had, so that later steps give the same bits.

    Raises:
      CacheFull: other sequences leave a group too few cells.
    """
    edit, whole = Remove(seq_id=seq_id, p0=checkpoint.pos), Remove(seq_id=seq_id)
    both = zip(before.groups, checkpoint.tails, strict=True)
    cut = CacheContents(
        groups=tuple(groups.apply(g, edit if x is None else whole)[0] for g, x in both),
        states=before.states and recurrent.apply(before.states, whole),
        history=history.apply(before.history, edit),
        checkpoints=checkpoints.apply(before.checkpoints, edit, joins=False),
    )
    newest = {0: ((checkpoint.pos - 1, 0),)}
    return insert.plan_insert(cut, checkpoint.tails, newest, {0: seq_id})

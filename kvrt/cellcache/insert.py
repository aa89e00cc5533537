"""Inserts saved cells, states and tokens into those of a cache: plans of restores and rewinds."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kvrt.arrays import Int32, UInt32
from kvrt.cellcache import group as groups
from kvrt.cellcache import history as histories
from kvrt.cellcache import recurrent, window
from kvrt.cellcache.checkpoint import checkpoints
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.history import TokenHistory, renumbered, with_room
from kvrt.cellcache.recurrent import RecurrentStates
from kvrt.cellcache.saved import KeptStates, SavedCells, of_sequence, one_owner
from kvrt.cells import slots
from kvrt.cells.cells import Cells, n_used, owned, seq_words
from kvrt.cells.edits import Remove
from kvrt.errors import CacheFull

Sequences = Mapping[int, int]  # saved seq_id -> seq_id in this cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class InsertPlan:
    """Where saved cells and states go.

    Attributes:
      contents: the contents afterwards.
      slots: by group the cell of each saved cell, the number of cells for those left out; None
        where nothing is inserted.
      states: by saved state index the one here.
    """

    contents: CacheContents
    slots: tuple[Int32[np.ndarray, " _"] | None, ...]
    states: Mapping[int, int]


def plan_insert(
    before: CacheContents,
    saved: Sequence[SavedCells | None],
    states: Mapping[int, KeptStates] | None,
    sequences: Sequences,
) -> InsertPlan:
    """Plans to insert sequences that are empty in some contents; their tokens are not inserted.

    Args:
      before: the contents.
      saved: cells by group; None leaves the group as it is.
      states: kept states by saved sequence; None without any.
      sequences: which, and their seq_ids here.

    Raises:
      CacheFull: there are too few cells.
    """
    both = zip(before.groups, saved, strict=True)
    new = [(g, None) if x is None else into_group(g, x, sequences) for g, x in both]
    kept, indices = before.states, {}
    if kept and states is not None:
        kept, indices = into_states(kept, states, sequences)
    after = dataclasses.replace(before, groups=tuple(g for g, _ in new), states=kept)
    return InsertPlan(contents=after, slots=tuple(x for _, x in new), states=indices)


def window_tail(group: CellGroup, seq_id: int) -> SavedCells | None:
    """The cells that a sequence's next token sees, as those of sequence 0.

    None where the group keeps every position. No change of positions may be pending.
    """
    if not group.rolls:
        return None
    cells = group.cells
    mine = np.flatnonzero(owned(cells, seq_id)).astype(np.int32)
    pos = np.asarray(cells.pos)[mine]
    seqs = one_owner(len(mine), 0)
    stays, lost = _seen(group, pos, seqs, {0: group.lost.get(seq_id, ())})
    return SavedCells(
        n_cells=len(cells.pos),
        head=group.head,
        index=mine[stays],
        pos=pos[stays],
        seqs=seqs[stays],
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
        history=histories.apply(before.history, edit),
        checkpoints=checkpoints.apply(before.checkpoints, edit, joins=False),
    )
    newest = {0: ((checkpoint.pos - 1, 0),)}
    return plan_insert(cut, checkpoint.tails, newest, {0: seq_id})


def into_group(
    group: CellGroup, saved: SavedCells, sequences: Sequences
) -> tuple[CellGroup, Int32[np.ndarray, " n"]]:
    """The group with the saved cells of some sequences.

    In an empty group of the saved one's size every cell keeps its number, so that later steps
    give the same bits; elsewhere cells are found as for new tokens, and a rolling group takes only
    those that later tokens see.

    Args:
      group: inserted sequences are empty in it.
      saved: the cells.
      sequences: which, and their seq_ids here.

    Returns:
      The group, and the cell of each saved cell; the number of cells for those left out.

    Raises:
      CacheFull: there are too few cells.
    """
    seqs = _renamed(saved.seqs, sequences, group.cells)
    lost = {here: saved.lost.get(s, ()) for s, here in sequences.items()}
    wanted = np.asarray(seqs.any(axis=1))
    n_cells = len(group.cells.pos)
    n_here = int(n_used(group.cells))
    same = n_here == 0 and n_cells == saved.n_cells
    if group.rolls and not same:
        wanted, lost = _seen(group, saved.pos, seqs, lost)
    n = int(np.count_nonzero(wanted))
    out = np.full(len(wanted), n_cells, np.int32)
    if same:
        out[wanted] = saved.index[wanted]
        head = saved.head
    else:
        if not group.rolls and n > (n_empty := groups.n_unreserved(group, n_here)):
            raise CacheFull(
                f"the session needs {n} cells, {n_empty} of {n_cells} are free; raise "
                "n_ctx, or trim the session"
            )
        found = groups.find(group, n, {}, n_here)
        group, out[wanted] = found.group, found.slots
        head = int(slots.next_head(found.slots)) if n else group.head
    pos, owners = group.cells.pos.copy(), group.cells.seqs.copy()
    pos[out[wanted]], owners[out[wanted]] = saved.pos[wanted], seqs[wanted]
    cells = Cells(pos=pos, delta=group.cells.delta, seqs=owners)
    all_lost = {**group.lost, **{s: x for s, x in lost.items() if x}}
    return dataclasses.replace(group, cells=cells, head=head, lost=all_lost), out


def into_states(
    states: RecurrentStates, saved: Mapping[int, KeptStates], sequences: Sequences
) -> tuple[RecurrentStates, dict[int, int]]:
    """The states with the newest saved ones of some sequences, as many as are kept here.

    Returns:
      The states, and the index of each inserted state by its saved index.
    """
    taken = {here: saved[s][-states.depth :] for s, here in sequences.items() if s in saved}
    used = {index for x in states.kept.values() for _, index in x}
    free = iter([index for index in range(states.n_states) if index not in used])
    to = {index: next(free) for index in sorted({i for x in taken.values() for _, i in x})}
    new = {s: tuple((pos, to[index]) for pos, index in x) for s, x in taken.items()}
    return dataclasses.replace(states, kept={**states.kept, **new}), to


def into_history(history: TokenHistory, saved: TokenHistory, sequences: Sequences) -> TokenHistory:
    """The history with the saved tokens of some sequences."""
    taken = {here: saved.pieces[s] for s, here in sequences.items() if s in saved.pieces}
    history = with_room(history, sum(x.shape[1] for some in taken.values() for x in some))
    # Whatever a file says, its marks end below the number of tokens.
    new, n_marks = renumbered(taken, history.n_marks)
    exact = {here: saved.exact[s] for s, here in sequences.items() if s in saved.exact}
    # What two saved sequences share is not known; one alone shares nothing.
    unshared = history.unshared.difference(new).union(new if len(new) == 1 else ())
    return TokenHistory(
        pieces={**history.pieces, **new},
        n_marks=n_marks,
        exact={**history.exact, **exact},
        unshared=unshared,
    )


def _renamed(
    seqs: UInt32[np.ndarray, "n W"], sequences: Sequences, cells: Cells
) -> UInt32[np.ndarray, "n V"]:
    """Owners as mask words of `cells`, with the seq_ids of this cache; others are left out."""
    out = np.zeros((len(seqs), cells.seqs.shape[1]), np.uint32)
    for s, here in sequences.items():
        out |= np.where(of_sequence(seqs, s)[:, None], seq_words(cells, here), np.uint32(0))
    return out


def _seen(
    group: CellGroup,
    pos: Int32[np.ndarray, " n"],
    seqs: np.ndarray,
    lost: Mapping[int, window.Intervals],
) -> tuple[np.ndarray, dict[int, window.Intervals]]:
    """Which cells some sequence's next token needs, and the positions lost with the others."""
    all_cells = Cells(pos=pos, delta=np.zeros_like(pos), seqs=seqs)
    wanted, after = np.zeros(len(pos), bool), dict(lost)
    for s in lost:
        mine = owned(all_cells, s)
        if not mine.any():
            continue
        last = int(pos[mine].max())
        wanted |= mine & (groups.must_stay(group, pos, last + 1) | (pos == last))
    for s in lost:
        gone = pos[owned(all_cells, s) & ~wanted]
        if len(gone):
            start, end = int(gone.min()), int(gone.max()) + 1
            after[s] = window.union(after[s], [(start, end)])
    return wanted, after

"""The cells of one group of layers on the host, edited, and searched for cells for new tokens.

Every change returns a new group, so that the changes of all groups can be planned, inspected and
then committed together or not at all.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.cellcache import blocks, window
from kvrt.cellcache.blocks import Blocks, CellCopies
from kvrt.cells import sequences, slots
from kvrt.cells.cells import Cells, create, n_bits, owned
from kvrt.cells.cells import n_free as count_free
from kvrt.cells.edits import Copy, Divide, Keep, Remove, SeqEdit, Shift
from kvrt.config import MAX_POS, MaskSpec
from kvrt.errors import BadRange, CacheFull, CannotRewind, SharedCells
from kvrt.sizes import Extent

# One in so many cells of a rolling group is released together with others.
_SPARE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellGroup:
    """Cells of one group of layers, in NumPy.

    Attributes:
      cells: positions and owners.
      head: where the next search for cells starts.
      mask: what the group's layers see.
      rolls: cells that no later token sees are used again.
      lost: positions whose cells were used again, by sequence; only where `rolls`.
      blocks: which sequences lie in blocks, None is none; never where `rolls`.
      n_pinned: where `rolls` and a policy drops positions, the first of each sequence that are
        never used again, as the policy never drops them: so each drop leaves all that a token
        sees. None is no policy.
    """

    cells: Cells
    mask: MaskSpec
    head: int = 0
    rolls: bool = False
    lost: Mapping[int, window.Intervals] = dataclasses.field(default_factory=dict)
    blocks: Blocks | None = None
    n_pinned: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundSlots:
    """Cells for new tokens.

    Attributes:
      slots: one a token.
      group: the group before the tokens are placed. Cells that are used again are empty in it, and
        the device needs a copy of it unless the tokens overwrite all of them.
    """

    slots: Int32[np.ndarray, " n"]
    group: CellGroup


def open_group(
    extent: Extent, mask: MaskSpec, n_seq_max: int, n_pinned: int | None = None
) -> CellGroup:
    """Empty cells."""
    cells = create(extent.n_cells, n_seq_max)
    return CellGroup(cells=cells, mask=mask, rolls=extent.rolls, n_pinned=n_pinned)


def must_stay(
    group: CellGroup, pos: Int32[np.ndarray, " n"], n_past: int
) -> Bool[np.ndarray, " n"]:
    """Which positions of a sequence have to stay, for its token at n_past and all after it.

    Where a policy drops positions later ones move down, by any distance. In a window they see what
    they saw; but a chunk may then begin anywhere among the last `size` positions, as a window does.
    """
    mask = group.mask
    if group.n_pinned is not None and mask.kind == "chunked":
        mask = dataclasses.replace(mask, kind="window")
    return (pos >= window.horizon(mask, n_past)) | (pos < (group.n_pinned or 0))


def main_group(groups: tuple[CellGroup, ...]) -> CellGroup:
    """The group that keeps every position, if there is one, else the first."""
    return next((g for g in groups if not g.rolls), groups[0])


def n_free_in(groups: tuple[CellGroup, ...]) -> int:
    """Tokens that all groups have cells for; rolling groups always have."""
    return min((n_unreserved(g) for g in groups if not g.rolls), default=MAX_POS)


def n_unreserved(group: CellGroup, n_used: int | None = None) -> int:
    """Empty cells that are not reserved for a sequence in blocks."""
    n = int(count_free(group.cells)) if n_used is None else len(group.cells.pos) - n_used
    if group.blocks is not None:
        n -= int(np.count_nonzero(blocks.reserved(group.cells, group.blocks)))
    return n


def n_past(group: CellGroup, seq_id: int) -> int:
    """The position of the next token of a sequence."""
    lost = group.lost.get(seq_id, ())
    end = int(sequences.seq_pos_max(group.cells, seq_id)) + 1
    return max(end, lost[-1][1]) if lost else end


def apply(group: CellGroup, edit: SeqEdit) -> tuple[CellGroup, CellCopies]:
    """The group after an edit, and the cells to copy first: shared ones that are to move.

    Raises:
      BadRange: a range is out of bounds; positions of a sequence in blocks would move, or it would
        share cells that do not lie as its blocks do.
      BadSequence: a sequence has no bit.
      CacheFull: too few cells are empty for copies of shared ones.
      CannotRewind: the next token would have to see cells that were used again.
    """
    match edit:
        case Remove():
            return _removed(group, edit), blocks.no_copies()
        case Copy():
            return _shared(group, edit), blocks.no_copies()
        case Keep():
            return _kept(group, edit), blocks.no_copies()
        case Shift():
            return _shifted(group, edit)
        case Divide():
            return _divided(group, edit)
        case _:
            assert_never(edit)


def clear(group: CellGroup) -> CellGroup:
    """The group with every cell empty."""
    return dataclasses.replace(
        group, cells=sequences.clear(group.cells), head=0, lost={}, blocks=None
    )


def group_to_cells(group: CellGroup, seqs: Iterable[int]) -> CellGroup:
    """The group without sequences in blocks; their tokens stay where they are."""
    if group.blocks is None or not (left := group.blocks.seqs - set(seqs)) < group.blocks.seqs:
        return group
    blocks = dataclasses.replace(group.blocks, seqs=left) if left else None
    return dataclasses.replace(group, blocks=blocks)


def find(group: CellGroup, n: int, first: Mapping[int, int], n_used: int) -> FoundSlots:
    """Cells for n tokens: empty ones, then in a rolling group those that no later token sees.

    No token is of a sequence in blocks; see `find_in_blocks`.

    Args:
      group: the group.
      n: tokens.
      first: by sequence, the position of its first new token, which sees the most: those after it
        may be drafts that do not stay.
      n_used: cells in use.

    Raises:
      CacheFull: there are too few.
    """
    if group.blocks is not None:
        return FoundSlots(slots=blocks.ring(group.cells, group.blocks, group.head, n), group=group)
    n_empty = len(group.cells.pos) - n_used
    if not group.rolls:
        found = slots.plan_slots(group.cells, group.head, n, n_used=n_used)
        return FoundSlots(slots=found, group=group)
    if n > n_empty:
        group = _released(group, _oldest(group, n - n_empty, first))
    # As if all were in use: the search is to go on from the head however many cells are empty, so
    # that a window that was cut back to a checkpoint is laid out as one that never was beyond it.
    found = slots.plan_slots(group.cells, group.head, n, n_used=len(group.cells.pos))
    return FoundSlots(slots=found, group=group)


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
    """As `find`, where sequences lie in blocks; after `group_copy_on_write`."""
    assert group.blocks is not None, "all lie in cells"
    pos = np.empty(len(seq_ids), np.int32)
    for s, p in first.items():
        here = seq_ids == s
        pos[here] = np.arange(p, p + np.count_nonzero(here), dtype=np.int32)
    found = blocks.plan_in_blocks(group.cells, group.blocks, group.head, seq_ids, pos)
    return FoundSlots(slots=found, group=group)


def check_room(group: CellGroup, seq_id: int, n: int, n_step: int) -> None:
    """Refuses tokens that a rolling group could not take in, n_step at a time.

    It always can, unless many cells share few positions, as after `Divide`.

    Raises:
      CacheFull: at some step more cells are visible than there are.
    """
    if not group.rolls:
        return
    end, which = n_past(group, seq_id), owned(group.cells, seq_id)
    others = _needed(group, {seq_id: MAX_POS}) & (group.cells.pos >= 0)
    # What is pinned of its own is counted with the rest of its own.
    others &= ~(which & (group.cells.pos < (group.n_pinned or 0)))
    n_others, mine = int(np.count_nonzero(others)), group.cells.pos[which]
    for k in range(0, n, n_step):
        own = np.concatenate([mine, np.arange(end, end + k, dtype=np.int32)])
        n_seen = n_others + int(np.count_nonzero(must_stay(group, own, end + k)))
        if n_seen + min(n_step, n - k) > len(group.cells.pos):
            raise _too_few(min(n_step, n - k), len(group.cells.pos) - n_seen, group)
        if window.horizon(group.mask, end + k) - group.mask.size >= end:
            return


def _needed(group: CellGroup, first: Mapping[int, int]) -> Bool[np.ndarray, " C"]:
    """Cells that cannot be used again: visible to a later token, or empty."""
    needed = np.asarray(group.cells.pos < 0)
    for s in _owners(group.cells):
        mine = owned(group.cells, s)
        # The newest token always stays, because it says where the sequence ends.
        last = first[s] if s in first else int(group.cells.pos[mine].max())
        pos = np.asarray(group.cells.pos)
        needed |= mine & (must_stay(group, pos, first.get(s, last + 1)) | (pos == last))
    return needed


def _too_few(n: int, found: int, group: CellGroup) -> CacheFull:
    return CacheFull(
        f"a step needs {n} cells of windowed layers, {max(found, 0)} of {len(group.cells.pos)} can "
        "be used; raise n_ubatch or set swa_full"
    )


def _oldest(group: CellGroup, n: int, first: Mapping[int, int]) -> Int32[np.ndarray, " M"]:
    """The cells of least position that no later token of any owner sees: n, or some more.

    The search costs as much as the rest of a step's plan, so it releases for many steps at once.
    """
    unseen = np.flatnonzero(~_needed(group, first))
    if len(unseen) < n:
        raise _too_few(n, len(unseen), group)
    n = max(n, len(group.cells.pos) // _SPARE)
    order = np.argsort(group.cells.pos[unseen], kind="stable")[:n]
    return unseen[order].astype(np.int32)


def _released(group: CellGroup, old: Int32[np.ndarray, " M"]) -> CellGroup:
    """The group without the cells `old`, nor any of their owners' cells of lower positions."""
    cells, lost = group.cells, dict(group.lost)
    those = dataclasses.replace(cells, pos=cells.pos[old], seqs=cells.seqs[old])
    for s in _owners(those):
        end = int(those.pos[owned(those, s)].max()) + 1
        start = max(int(sequences.seq_pos_min(cells, s)), group.n_pinned or 0)
        lost[s] = window.union(lost.get(s, ()), [(start, end)])
        cells = sequences.seq_rm(cells, s, group.n_pinned or 0, end)
    return dataclasses.replace(group, cells=cells, lost=lost)


def _owners(cells: Cells) -> list[int]:
    """Sequences that own a cell."""
    words = np.bitwise_or.reduce(cells.seqs, axis=0)
    if not words.any():
        return []
    return [s for s in range(n_bits(cells)) if words[s >> 5] >> np.uint32(s & 31) & 1]


def _removed(group: CellGroup, edit: Remove) -> CellGroup:
    cells = sequences.apply(group.cells, edit)
    head = int(slots.lowered_head(group.cells, cells, group.head))
    seqs = list(group.lost) if edit.seq_id is None else [edit.seq_id]
    new = dataclasses.replace(group, cells=cells, head=head)
    if new.blocks is not None:
        hit = new.blocks.seqs if edit.seq_id is None else new.blocks.seqs & {edit.seq_id}
        new = group_to_cells(new, [s for s in hit if not owned(cells, s).any()])
    return _checked(_with_lost(new, seqs, lambda x: window.without(x, edit.p0, edit.p1)), seqs)


def _shared(group: CellGroup, edit: Copy) -> CellGroup:
    new = dataclasses.replace(group, cells=sequences.apply(group.cells, edit))
    if group.blocks is not None and edit.dst in group.blocks.seqs:
        _refuse_joined(group, new.cells, edit)
    shared = window.within(group.lost.get(edit.src, ()), edit.p0, edit.p1)
    seqs = [edit.dst]
    return _checked(_with_lost(new, seqs, lambda x: window.union(x, shared)), seqs)


def _kept(group: CellGroup, edit: Keep) -> CellGroup:
    cells = sequences.apply(group.cells, edit)
    head = int(slots.lowered_head(group.cells, cells, group.head))
    lost = {s: x for s, x in group.lost.items() if s == edit.seq_id}
    new = dataclasses.replace(group, cells=cells, head=head, lost=lost)
    return group_to_cells(new, new.blocks.seqs - {edit.seq_id}) if new.blocks else new


def _shifted(group: CellGroup, edit: Shift) -> tuple[CellGroup, CellCopies]:
    if edit.d == 0:
        return _unmoved(group, edit)
    _refuse_moved(group, edit)
    split, cells, copies = _split_and_moved(group, edit)
    # A move to higher positions empties no cell.
    head = int(slots.first_freed(split.cells, cells)) if edit.d < 0 else 0
    new = dataclasses.replace(split, cells=cells, head=head)
    seqs = [edit.seq_id]
    new = _with_lost(new, seqs, lambda x: window.added(x, edit.p0, edit.p1, edit.d))
    return _checked(new, seqs), copies


def _divided(group: CellGroup, edit: Divide) -> tuple[CellGroup, CellCopies]:
    if edit.d == 1:
        return _unmoved(group, edit)
    _refuse_moved(group, edit)
    split, cells, copies = _split_and_moved(group, edit)
    new = dataclasses.replace(split, cells=cells)
    seqs = [edit.seq_id]
    new = _with_lost(new, seqs, lambda x: window.divided(x, edit.p0, edit.p1, edit.d))
    return _checked(new, seqs), copies


def _unmoved(group: CellGroup, edit: Shift | Divide) -> tuple[CellGroup, CellCopies]:
    """The group as it is; what is wrong with the edit is raised all the same."""
    sequences.apply(group.cells, edit)
    return group, blocks.no_copies()


def _split_and_moved(group: CellGroup, edit: Shift | Divide) -> tuple[CellGroup, Cells, CellCopies]:
    """The group with private copies of shared cells, its cells after an edit, and the copies."""
    try:
        return group, sequences.apply(group.cells, edit), blocks.no_copies()
    except SharedCells:
        split, copies = _split(group, edit)
        return split, sequences.apply(split.cells, edit), copies


def _split(group: CellGroup, edit: Shift | Divide) -> tuple[CellGroup, CellCopies]:
    """The group with private copies of what a sequence shares in the range of an edit."""
    where = edit.seq_id, edit.p0, edit.p1
    lacking = int(sequences.n_shared(group.cells, *where)) - int(count_free(group.cells))
    if group.rolls and lacking > 0:
        group = _released(group, _oldest(group, lacking, {}))
    kept = None if group.blocks is None else blocks.reserved(group.cells, group.blocks)
    cells, src, dst = sequences.plan_split(group.cells, *where, group.head, kept)
    return dataclasses.replace(group, cells=cells), (src, dst)


def _refuse_moved(group: CellGroup, edit: Shift | Divide) -> None:
    if group.blocks is None or edit.seq_id not in group.blocks.seqs:
        return
    hit = owned(group.cells, edit.seq_id) & (group.cells.pos >= edit.p0)
    n = int(np.count_nonzero(hit if edit.p1 is None else hit & (group.cells.pos < edit.p1)))
    if n:
        raise BadRange(
            f"{n} positions of sequence {edit.seq_id} cannot move: it lies in blocks, where the "
            "position is the place; take it out with to_cells first"
        )


def _refuse_joined(group: CellGroup, cells: Cells, edit: Copy) -> None:
    n_before = np.count_nonzero(owned(group.cells, edit.dst))
    n = int(np.count_nonzero(owned(cells, edit.dst)) - n_before)
    if n:
        raise BadRange(
            f"sequence {edit.dst} lies in blocks and cannot share {n} cells of sequence "
            f"{edit.src}, which are not its places; take it out with to_cells first"
        )


def _with_lost(
    group: CellGroup, seqs: Iterable[int], change: Callable[[window.Intervals], window.Intervals]
) -> CellGroup:
    """The group with other lost positions of some sequences."""
    if not group.rolls and not group.lost:
        return group
    lost = {**group.lost, **{s: change(group.lost.get(s, ())) for s in seqs}}
    return dataclasses.replace(group, lost={s: x for s, x in lost.items() if x})


def _checked(group: CellGroup, seqs: Iterable[int]) -> CellGroup:
    """The group, if every next token finds what it has to see."""
    for s in seqs:
        lost = group.lost.get(s, ())
        if lost and lost[0][0] < group.mask.n_sink:
            raise CannotRewind(
                f"sequence {s} would have lost the position {lost[0][0]} of layers that see the "
                f"first {group.mask.n_sink} for ever; keep what lies before them, or clear the "
                "sequence"
            )
        if lost and lost[-1][1] > window.horizon(group.mask, n_past(group, s)):
            *_, (_, earliest) = window.resume_gaps(group.mask, lost)
            raise CannotRewind(
                f"sequence {s} would end at position {n_past(group, s)}, where layers with a "
                f"{group.mask.kind} of {group.mask.size} see positions below {lost[-1][1]} that "
                f"they have dropped; the earliest is {earliest}, "
                "clear the sequence or set swa_full"
            )
    return group

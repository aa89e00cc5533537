"""Which states of recurrent layers are kept, by index: those after each sequence's newest tokens.

A state contains everything before it and no part of it can be removed, so a sequence can be cut
back only to a token whose state is still kept, and none of its positions can move but by
SelfExtend, which takes no token out. A copied
sequence shares states; a token always writes to an index that no sequence uses, so that sharing
needs no copy.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import assert_never

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.cellcache.saved import KeptStates
from kvrt.cellcache.window import Intervals
from kvrt.cells.cells import Cells, create, owner_bits
from kvrt.cells.checks import check_distance, check_divisor, check_range
from kvrt.cells.edits import Copy, Divide, Keep, Remove, SeqEdit, Shift
from kvrt.errors import CannotRewind


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentStates:
    """State indices by sequence.

    Attributes:
      n_states: states that can be kept; index n_states stands for no state yet.
      depth: newest tokens of a sequence whose states are kept.
      kept: (pos, index) of each sequence's states, ascending; positions follow each other.
    """

    n_states: int
    depth: int
    kept: Mapping[int, KeptStates] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePlan:
    """State indices that tokens read and write in their order, and the states afterwards."""

    src: Int32[np.ndarray, " T"]
    dst: Int32[np.ndarray, " T"]
    after: RecurrentStates


def n_past(states: RecurrentStates, seq_id: int) -> int:
    """The position of the next token of a sequence."""
    kept = states.kept.get(seq_id, ())
    return kept[-1][0] + 1 if kept else 0


def resume_gaps(states: RecurrentStates, seq_id: int) -> Intervals:
    """Positions [a, b) that a sequence cannot be cut back to: all between 0 and its kept states."""
    kept = states.kept.get(seq_id, ())
    return ((1, kept[0][0] + 1),) if kept and kept[0][0] else ()


def apply(states: RecurrentStates, edit: SeqEdit) -> RecurrentStates:
    """The states after an edit.

    Raises:
      BadRange: a range, a distance or a divisor is out of bounds.
      CannotRewind: a removal is neither all of a sequence nor its end after a kept state; a copy
        is not from position 0 to a kept state or beyond, or dst is not empty; positions that a
        sequence has would move.
    """
    match edit:
        case Remove():
            return _removed(states, edit)
        case Copy():
            return _copied(states, edit)
        case Keep(seq_id=seq_id):
            return _with(states, {s: x for s, x in states.kept.items() if s == seq_id})
        case Shift():
            return _unmoved(states, edit, changes=check_distance(edit.d) != 0)
        case Divide():
            return _unmoved(states, edit, changes=check_divisor(edit.d) != 1)
        case _:
            assert_never(edit)


def folded(states: RecurrentStates, seq_id: int, n_past: int) -> RecurrentStates:
    """The states after SelfExtend has moved a sequence, which ends at n_past since then.

    A state has all tokens before it, whatever their positions. Only the newest one stays: tokens
    may share the positions of others.
    """
    kept = states.kept.get(seq_id, ())
    if not kept:
        return states
    return _with(states, {**states.kept, seq_id: ((n_past - 1, kept[-1][1]),)})


def clear(states: RecurrentStates) -> RecurrentStates:
    """The states without any sequence."""
    return _with(states, {})


def plan_states(
    states: RecurrentStates, seq_ids: Int32[np.ndarray, " T"], first: Mapping[int, int]
) -> StatePlan:
    """State indices of tokens in their order; a plan of fewer tokens is the beginning of this one.

    Args:
      states: as they are.
      seq_ids: sequence of each token.
      first: by sequence, the position of its first token.
    """
    kept = {s: list(x) for s, x in states.kept.items()}
    users = Counter(i for x in kept.values() for _, i in x)
    free = [i for i in reversed(range(states.n_states)) if i not in users]
    src, dst = [], []
    for s in seq_ids.tolist():
        mine = kept.setdefault(s, [])
        src.append(mine[-1][1] if mine else states.n_states)
        pos = mine[-1][0] + 1 if mine else first[s]
        if len(mine) == states.depth:
            _, index = mine.pop(0)
            users[index] -= 1
            if not users[index]:
                free.append(index)
        index = free.pop()
        users[index] = 1
        dst.append(index)
        mine.append((pos, index))
    after = _with(states, {s: tuple(x) for s, x in kept.items()})
    return StatePlan(src=np.array(src, np.int32), dst=np.array(dst, np.int32), after=after)


def plan_probe(states: RecurrentStates, seq_id: int, n: int) -> StatePlan:
    """State indices of n tokens after a sequence that all write to one, to be put back after them.

    That is the newest state of the sequence, or one that nobody keeps.
    """
    kept = states.kept.get(seq_id, ())
    at = kept[-1][1] if kept else int(np.flatnonzero(released(states))[0])
    src = np.full(n, at, np.int32)
    src[:1] = at if kept else states.n_states
    return StatePlan(src=src, dst=np.full(n, at, np.int32), after=states)


def released(states: RecurrentStates) -> Bool[np.ndarray, " R"]:
    """Which indices no sequence uses."""
    free = np.ones(states.n_states, bool)
    free[[i for kept in states.kept.values() for _, i in kept]] = False
    return free


def packed(states: RecurrentStates) -> tuple[dict[int, KeptStates], Int32[np.ndarray, " n"]]:
    """Kept states with indices numbered among those in use, and the latter, ascending."""
    used = sorted({i for x in states.kept.values() for _, i in x})
    number = {index: k for k, index in enumerate(used)}
    kept = {s: tuple((pos, number[i]) for pos, i in x) for s, x in states.kept.items()}
    return kept, np.array(used, np.int32)


def as_cells(states: RecurrentStates, n_seq_max: int) -> Cells:
    """The states as cells, one a state, for reports."""
    cells = create(states.n_states, n_seq_max)
    for s, kept in states.kept.items():
        for pos, index in kept:
            cells.pos[index] = pos
            cells.seqs[index] |= np.asarray(owner_bits(cells, s))
    return cells


def _with(states: RecurrentStates, kept: Mapping[int, KeptStates]) -> RecurrentStates:
    return dataclasses.replace(states, kept={s: x for s, x in kept.items() if x})


def _removed(states: RecurrentStates, edit: Remove) -> RecurrentStates:
    p0, p1 = check_range(edit.p0, edit.p1)
    kept = dict(states.kept)
    for s in list(kept) if edit.seq_id is None else [edit.seq_id]:
        end = n_past(states, s)
        if p0 >= end or p0 == p1:
            continue
        first = _first_kept(states, s)
        if (p1 is not None and p1 < end) or 0 < p0 < first:
            raise CannotRewind(
                f"positions [{p0}, {end if p1 is None else p1}) of sequence {s} are part of the "
                f"state of recurrent layers, which ends at {end} and can be cut back to {first} "
                "at the earliest; clear the sequence, or keep more states with n_rs_seq"
            )
        kept[s] = tuple(x for x in kept[s] if x[0] < p0)
    return _with(states, kept)


def _copied(states: RecurrentStates, edit: Copy) -> RecurrentStates:
    src, dst = edit.src, edit.dst
    p0, p1 = check_range(edit.p0, edit.p1)
    end = n_past(states, src)
    last = end if p1 is None else min(p1, end)
    if src == dst or p0 >= last:
        return states
    if p0 > 0 or states.kept.get(dst) or last < _first_kept(states, src):
        raise CannotRewind(
            f"positions [{p0}, {last}) of sequence {src} cannot become sequence {dst}: states of "
            f"recurrent layers are copied from position 0 to {_first_kept(states, src)} or "
            "beyond, into an empty sequence; clear it, or keep more states with n_rs_seq"
        )
    copied = tuple(x for x in states.kept[src] if x[0] < last)
    return _with(states, {**states.kept, dst: copied})


def _first_kept(states: RecurrentStates, seq_id: int) -> int:
    """The least position above 0 that a sequence can be cut back to; 0 if it is empty."""
    kept = states.kept.get(seq_id, ())
    return kept[0][0] + 1 if kept else 0


def _unmoved(states: RecurrentStates, edit: Shift | Divide, *, changes: bool) -> RecurrentStates:
    """The states, where an edit that `changes` positions has none of theirs."""
    p0, p1 = check_range(edit.p0, edit.p1)
    end = n_past(states, edit.seq_id)
    if changes and p0 < (end if p1 is None else min(p1, end)):
        raise CannotRewind(
            f"positions of sequence {edit.seq_id} cannot move: its {end} tokens are one state of "
            "recurrent layers; do without context shift, SelfExtend, seq_add and seq_div"
        )
    return states

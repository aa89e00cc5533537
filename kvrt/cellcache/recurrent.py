"""Where the states of recurrent layers are kept: one row a token, of the newest tokens only.

A state holds everything before it and cannot forget a part, so a sequence can be cut back only to
a token whose state is still there, and nothing in it can be moved. A copied sequence shares rows;
a token always writes a row that nobody else owns, so sharing needs no copy.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.cellcache.source import Held
from kvrt.cells.cells import Cells, create, owner_bits
from kvrt.cells.checks import check_distance, check_divisor, check_range
from kvrt.errors import CannotRewind


@dataclasses.dataclass(frozen=True, kw_only=True)
class States:
    """Rows by sequence.

    Attributes:
      n_rows: rows there are; one more is scratch, and one beyond it stands for no state yet.
      depth: newest tokens of a sequence whose states are kept.
      held: (pos, row) of each sequence's states, ascending; positions follow each other.
    """

    n_rows: int
    depth: int
    held: Mapping[int, Held] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePlan:
    """Rows that tokens read and write in their order, and the states afterwards."""

    src: Int32[np.ndarray, " T"]
    dst: Int32[np.ndarray, " T"]
    after: States


def n_past(states: States, seq_id: int) -> int:
    """Where the next token of a sequence stands."""
    held = states.held.get(seq_id, ())
    return held[-1][0] + 1 if held else 0


def earliest_resume(states: States, seq_id: int) -> int:
    """The least position above 0 that a sequence can be cut back to; 0 if it is empty."""
    held = states.held.get(seq_id, ())
    return held[0][0] + 1 if held else 0


def rm(states: States, seq_id: int | None, p0: int = 0, p1: int | None = None) -> States:
    """Without positions [p0, p1) of a sequence, or of all with None.

    Raises:
      CannotRewind: it is neither all of a sequence nor its end after a state that is kept.
    """
    p0, p1 = check_range(p0, p1)
    held = dict(states.held)
    for s in list(held) if seq_id is None else [seq_id]:
        end = n_past(states, s)
        if p0 >= end or p0 == p1:
            continue
        first = earliest_resume(states, s)
        if (p1 is not None and p1 < end) or 0 < p0 < first:
            raise CannotRewind(
                f"positions [{p0}, {end if p1 is None else p1}) of sequence {s} are part of the "
                f"state of recurrent layers, which ends at {end} and can be cut back to {first} "
                "at the earliest; clear the sequence, or keep more states with n_rs_seq"
            )
        held[s] = tuple(x for x in held[s] if x[0] < p0)
    return _with(states, held)


def cp(states: States, src: int, dst: int, p0: int = 0, p1: int | None = None) -> States:
    """With the states of src shared by dst, up to position p1.

    Raises:
      CannotRewind: dst holds something, or what is copied does not begin at 0 or end at a state
        that is kept.
    """
    p0, p1 = check_range(p0, p1)
    end = n_past(states, src)
    last = end if p1 is None else min(p1, end)
    if src == dst or p0 >= last:
        return states
    if p0 > 0 or states.held.get(dst) or last < earliest_resume(states, src):
        raise CannotRewind(
            f"positions [{p0}, {last}) of sequence {src} cannot become sequence {dst}: states of "
            f"recurrent layers are copied from position 0 to {earliest_resume(states, src)} or "
            "beyond, into an empty sequence; clear it, or keep more states with n_rs_seq"
        )
    copied = tuple(x for x in states.held[src] if x[0] < last)
    return _with(states, {**states.held, dst: copied})


def keep(states: States, seq_id: int) -> States:
    """With one sequence alone."""
    return _with(states, {s: x for s, x in states.held.items() if s == seq_id})


def clear(states: States) -> States:
    """With no sequence."""
    return _with(states, {})


def add(states: States, seq_id: int, p0: int, p1: int | None, d: int) -> States:
    """The states, which no position of a sequence can leave.

    Raises:
      CannotRewind: positions that the sequence has would move.
    """
    return _refuse_move(states, seq_id, p0, p1, moves=check_distance(d) != 0)


def div(states: States, seq_id: int, p0: int, p1: int | None, d: int) -> States:
    """As `add`, for a division of positions by d."""
    return _refuse_move(states, seq_id, p0, p1, moves=check_divisor(d) != 1)


def plan(states: States, seq_ids: Int32[np.ndarray, " T"], first: Mapping[int, int]) -> StatePlan:
    """Rows of tokens in their order; the plan of fewer tokens is the beginning of this one.

    Args:
      states: as they are.
      seq_ids: sequence of each token.
      first: by sequence, the position of its first token.
    """
    held = {s: list(x) for s, x in states.held.items()}
    owners = Counter(row for x in held.values() for _, row in x)
    free = [row for row in reversed(range(states.n_rows)) if row not in owners]
    src, dst = [], []
    for s in seq_ids.tolist():
        mine = held.setdefault(s, [])
        src.append(mine[-1][1] if mine else states.n_rows + 1)
        pos = mine[-1][0] + 1 if mine else first[s]
        if len(mine) == states.depth:
            _, row = mine.pop(0)
            owners[row] -= 1
            if not owners[row]:
                free.append(row)
        row = free.pop()
        owners[row] = 1
        dst.append(row)
        mine.append((pos, row))
    after = _with(states, {s: tuple(x) for s, x in held.items()})
    return StatePlan(src=np.array(src, np.int32), dst=np.array(dst, np.int32), after=after)


def plan_probe(states: States, seq_id: int, n: int) -> StatePlan:
    """Rows of n tokens after a sequence that leave every state as it is."""
    held, scratch = states.held.get(seq_id, ()), states.n_rows
    start = held[-1][1] if held else states.n_rows + 1
    src = np.array([start, *[scratch] * (n - 1)], np.int32)
    return StatePlan(src=src, dst=np.full(n, scratch, np.int32), after=states)


def released(states: States) -> Bool[np.ndarray, " R"]:
    """Which rows belong to no sequence, the scratch row included."""
    free = np.ones(states.n_rows + 1, bool)
    free[[row for held in states.held.values() for _, row in held]] = False
    return free


def packed(states: States) -> tuple[dict[int, Held], Int32[np.ndarray, " n"]]:
    """What is held with rows counted among those in use, and these rows, ascending."""
    used = sorted({row for x in states.held.values() for _, row in x})
    number = {row: i for i, row in enumerate(used)}
    held = {s: tuple((pos, number[row]) for pos, row in x) for s, x in states.held.items()}
    return held, np.array(used, np.int32)


def as_cells(states: States, n_seq_max: int) -> Cells:
    """The rows as cells, for a look at them."""
    cells = create(states.n_rows, n_seq_max)
    for s, held in states.held.items():
        for pos, row in held:
            cells.pos[row] = pos
            cells.seqs[row] |= np.asarray(owner_bits(cells, s))
    return cells


def _with(states: States, held: Mapping[int, Held]) -> States:
    return dataclasses.replace(states, held={s: x for s, x in held.items() if x})


def _refuse_move(states: States, seq_id: int, p0: int, p1: int | None, *, moves: bool) -> States:
    p0, p1 = check_range(p0, p1)
    end = n_past(states, seq_id)
    if moves and p0 < (end if p1 is None else min(p1, end)):
        raise CannotRewind(
            f"positions of sequence {seq_id} cannot move: its {end} tokens are one state of "
            "recurrent layers; do without context shift, SelfExtend, seq_add and seq_div"
        )
    return states

"""One sequence of a session that holds several, written while the others stay as they are.

The others are taken from the file as it stands when it is written, so that programs which write
different sequences of one session never undo each other.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvrt.arrays import AnyArray
from kvrt.cellcache.history import TokenHistory, renumbered
from kvrt.cellcache.saved import one_owner
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import BadSequence, SaveError
from kvrt.session import io
from kvrt.session.change import edit
from kvrt.session.fingerprint import check_match
from kvrt.session.kv_file.file import Before, Saved
from kvrt.session.snapshot import (
    BLOCK_CELLS,
    BlockCells,
    CheckpointPart,
    GroupPart,
    Snapshot,
    StatePart,
)

_TRIES = 16  # saves of others in a row, after which something is wrong
_X = TypeVar("_X")


class _Changed(Exception):
    """Another program has written the session since it was read."""


def save_sequence(
    path: str | Path,
    snapshot: Snapshot,
    seq_id: int,
    container: io.Container | None = None,
    *,
    before: Before | None = None,
) -> Saved:
    """`kvrt.session.save` of one sequence; other sequences of the session stay to the bit.

    Cells that the sequence shared with others are written twice from then on.

    Args:
      path: of a session, or where none is yet.
      snapshot: of a runtime; its sequence 0 is written, others of it are not.
      seq_id: the sequence of the session that it becomes.
      container: as for `save`.
      before: as for `save`; asked each time that the others had to be read again.

    Raises:
      BadSequence: the snapshot has no sequence 0, or seq_id is none that a session can have.
      SessionMismatch: the session is of another model or cache.
      BadSession: it is damaged.
      SaveError: it cannot be written.
    """
    path = Path(path)
    for _ in range(_TRIES):
        held = io.open_session(path) if os.path.lexists(path) else None
        others = None if held is None else io.read(held)
        new = with_sequence(others, seq_id, snapshot)
        sha256 = None if held is None else held.sha256

        def unchanged(now: Path, sha256: bytes | None = sha256) -> None:
            if before is not None:
                before(now)
            there = io.open_session(now).sha256 if os.path.lexists(now) else None
            if there != sha256:
                raise _Changed

        try:
            return io.save(path, new, container, before=unchanged)
        except _Changed:
            continue
    raise SaveError(
        f"{path}: others wrote it {_TRIES} times while sequence {seq_id} was to be saved; try again"
    )


def with_sequence(others: Snapshot | None, seq_id: int, new: Snapshot) -> Snapshot:
    """A snapshot with sequence 0 of a new one as its sequence seq_id, in place of what that was.

    Args:
      others: of whose sequences all others stay; None for none.
      seq_id: its number.
      new: of which the rest is left out.

    Raises:
      BadSequence: `new` has no sequence 0, or seq_id is outside [0, 4,095].
      SessionMismatch: the two are of different models or caches.
    """
    if not 0 <= seq_id < MAX_SEQUENCES:
        raise BadSequence(f"sequence {seq_id}; ids of a session are 0 to {MAX_SEQUENCES - 1}")
    if 0 not in new.seq_ids:
        raise BadSequence(f"there is no sequence 0 to save; found {list(new.seq_ids)}")
    for s in new.seq_ids[1:]:
        new = edit.cut(new, s, 0)
    if others is not None:
        check_match(others.fingerprint, new.fingerprint, convert=False)
        if seq_id in others.seq_ids:
            others = edit.cut(others, seq_id, 0)
    new = _renumbered(new, seq_id)
    return new if others is None or not others.seq_ids else join_sequences(others, new)


def _renumbered(new: Snapshot, seq_id: int) -> Snapshot:
    """A snapshot of sequence 0 alone, as another one."""

    def of(x: Mapping[int, _X]) -> dict[int, _X]:
        return {seq_id: x[0]} if 0 in x else {}

    def group(part: GroupPart) -> GroupPart:
        return dataclasses.replace(part, seqs=one_owner(len(part.pos), seq_id), lost=of(part.lost))

    def checkpoint(x: CheckpointPart) -> CheckpointPart:
        return dataclasses.replace(x, seq_ids=(seq_id,))

    held = new.history
    return dataclasses.replace(
        new,
        groups=tuple(map(group, new.groups)),
        states=new.states and dataclasses.replace(new.states, held=of(new.states.held)),
        history=TokenHistory(
            pieces=of(held.pieces),
            n_marks=held.n_marks,
            exact=of(held.exact),
            unshared=frozenset({seq_id}),
        ),
        ga_i=of(new.ga_i),
        logits=of(new.logits),
        draws=of(new.draws),
        policies=of(new.policies),
        checkpoints=tuple(map(checkpoint, new.checkpoints)),
        in_blocks=(seq_id,) if new.in_blocks else (),
    )


def join_sequences(others: Snapshot, new: Snapshot) -> Snapshot:
    """Two snapshots without a sequence in common, as one."""
    return dataclasses.replace(
        new,
        groups=tuple(map(_group, others.groups, new.groups)),
        states=others.states and new.states and _states(others.states, new.states),
        history=_history(others.history, new.history),
        select=new.select or others.select,
        ga_i={**others.ga_i, **new.ga_i},
        logits={**others.logits, **new.logits},
        draws={**others.draws, **new.draws},
        policies={**others.policies, **new.policies},
        checkpoints=others.checkpoints + new.checkpoints,
        in_blocks=tuple(sorted(others.in_blocks + new.in_blocks)),
    )


def _group(a: GroupPart, b: GroupPart) -> GroupPart:
    """The cells of both: the others' first and without gaps, then whole blocks on."""
    n_a, n_b = len(a.pos), len(b.pos)
    start = -(-n_a // BLOCK_CELLS) * BLOCK_CELLS
    index = np.concatenate([np.arange(n_a), start + np.arange(n_b)]).astype(np.int32)
    n_cells = max(a.n_cells, b.n_cells, start + n_b)
    n_words = max(a.seqs.shape[1], b.seqs.shape[1])
    return GroupPart(
        n_cells=n_cells,
        head=(start + n_b) % n_cells,
        index=index,
        pos=np.concatenate([a.pos, b.pos]),
        seqs=np.concatenate([_widened(a.seqs, n_words), _widened(b.seqs, n_words)]),
        lost={**a.lost, **b.lost},
        blocks=BlockCells([*a.blocks, *b.blocks]).in_blocks(np.arange(n_a + n_b)),
    )


def _states(a: StatePart, b: StatePart) -> StatePart:
    """States of both, those of b counted behind those of a."""
    n = len(a.tables[0][0]) if a.tables else 0
    moved = {s: tuple((pos, at + n) for pos, at in kept) for s, kept in b.held.items()}

    def both(x: AnyArray, y: AnyArray) -> AnyArray:
        return np.concatenate([np.asarray(x), np.asarray(y)])

    tables = tuple(
        tuple(map(both, of_a, of_b)) for of_a, of_b in zip(a.tables, b.tables, strict=True)
    )
    return StatePart(held={**a.held, **moved}, tables=tables)


def _history(a: TokenHistory, b: TokenHistory) -> TokenHistory:
    """Tokens of both. Marks are numbered anew, so that many saves do not use them up."""
    of_a, n = renumbered(a.pieces)
    of_b, n = renumbered(b.pieces, n)
    return TokenHistory(
        pieces={**of_a, **of_b},
        n_marks=n,
        exact={**a.exact, **b.exact},
        unshared=a.unshared | b.unshared,
    )


def _widened(seqs: np.ndarray, n_words: int) -> np.ndarray:
    """The same bits in more words."""
    return np.pad(seqs, ((0, 0), (0, n_words - seqs.shape[1])))

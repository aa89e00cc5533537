"""What is sound of a damaged session: all that its digests prove, and nothing else.

A block of 256 cells that has another digest ends each sequence that has a token in it, before the
first such token. Windowed and recurrent layers cannot be cut back: there a sequence ends at its
newest sound context checkpoint before that, or goes.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kvrt.cellcache import history as histories
from kvrt.cellcache.saved import SavedCells, of_sequence, one_owner
from kvrt.cells.edits import Keep, Remove
from kvrt.errors import DAMAGED, BadSession, CannotRewind
from kvrt.session import codec, expected, io
from kvrt.session.change import edit
from kvrt.session.change.sequences import join_sequences
from kvrt.session.divided import pieces
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.manifest import Manifest
from kvrt.session.snapshot import (
    BlockCells,
    CheckpointPart,
    GroupPart,
    Snapshot,
    only_state,
    some_of_part,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repaired:
    """What is left of a damaged session.

    Attributes:
      snapshot: with the tokens that are left.
      damage: names of what is damaged; none of a sound session.
      n_tokens: tokens by sequence, before.
      n_kept: likewise, those that are left.
    """

    snapshot: Snapshot
    damage: tuple[str, ...]
    n_tokens: dict[int, int]
    n_kept: dict[int, int]


def repaired(path: str | Path) -> Repaired:
    """The longest beginning of each sequence whose keys, values and states have their digests.

    Raises:
      BadSession: manifest, or cells and tokens, are damaged, so that nothing is proven.
    """
    path = Path(path)
    try:
        return _unchanged(io.read(path))
    except BadSession as error:
        first = _reason(error, path)
    try:
        manifest, parts = io.read_parts(path)
        if isinstance(parts[-1], BadSession):
            raise parts[-1]
        groups, history = codec.cells(manifest, parts[-1])
    except BadSession as error:
        raise BadSession(
            f"{path}: {_reason(error, path)}; without it nothing of the session is proven: kvrt "
            f"run --overwrite replaces it, and keeps it as {path.name}~"
        ) from error
    names = codec.blob_names(manifest)
    damage = [n for n, x in zip(names, parts, strict=True) if isinstance(x, BadSession)]
    n_rows = sum(len(g.blocks) for g in manifest.groups)
    ends = _ends(manifest, groups, [isinstance(x, BadSession) for x in parts[:n_rows]])
    has_states = manifest.states is None or not isinstance(parts[n_rows], BadSession)
    manifest, tensors = _filled(manifest, parts)
    whole = sound = codec.from_tensors(manifest, tensors, (groups, history))
    for s in whole.seq_ids:
        if not has_states or any(s in x for x in ends):
            sound = _ended(whole, sound, s, ends, has_states=has_states)
    return Repaired(
        snapshot=sound,
        damage=tuple(damage) or (first,),
        n_tokens={s: _n_tokens(whole, s) for s in whole.seq_ids},
        n_kept={s: _n_tokens(sound, s) for s in whole.seq_ids},
    )


def _unchanged(snapshot: Snapshot) -> Repaired:
    n_tokens = {s: _n_tokens(snapshot, s) for s in snapshot.seq_ids}
    return Repaired(snapshot=snapshot, damage=(), n_tokens=n_tokens, n_kept=n_tokens)


def _reason(error: BadSession, path: Path) -> str:
    """What is wrong, without the name of the session and the remedy."""
    return str(error).removeprefix(f"{path}: ").removesuffix(f"; {DAMAGED}")


def _n_tokens(snapshot: Snapshot, seq_id: int) -> int:
    return len(histories.positions(snapshot.history, seq_id))


def _ends(
    manifest: Manifest, groups: Sequence[SavedCells], is_damaged: Sequence[bool]
) -> list[dict[int, int]]:
    """By group and sequence the least position of a cell whose keys or values are damaged."""
    out, flags = [], iter(is_damaged)
    for entry, cells in zip(manifest.groups, groups, strict=True):
        ends: dict[int, int] = {}
        for piece in pieces(entry.parts):
            if not next(flags):
                continue
            here = slice(piece.start, piece.start + piece.n)
            pos, words = cells.pos[here], cells.seqs[here]
            for s in manifest.n_tokens:
                mine = pos[of_sequence(words, s)]
                if len(mine):
                    ends[s] = min(ends.get(s, int(mine.min())), int(mine.min()))
        out.append(ends)
    return out


def _filled(
    manifest: Manifest, parts: Sequence[Tensors | BadSession]
) -> tuple[Manifest, list[Tensors]]:
    """The manifest without damaged checkpoints, and its tensors, zeros for what is damaged."""
    *rest, meta = parts
    n_kept = len(manifest.checkpoints)
    rows, checkpoints = rest[: len(rest) - n_kept], rest[len(rest) - n_kept :]
    specs = [
        expected.row_block(manifest, g, i)
        for g, entry in enumerate(manifest.groups)
        for i in range(len(entry.blocks))
    ]
    if manifest.states is not None:
        specs.append(expected.state_tables(manifest))
    tensors: list[Tensors] = [
        {name: np.zeros(x.shape, x.dtype) for name, x in arrays.items()}
        if isinstance(part, BadSession)
        else part
        for part, arrays in zip(rows, specs, strict=True)
    ]
    sound = [
        (c, x)
        for c, x in zip(manifest.checkpoints, checkpoints, strict=True)
        if not isinstance(x, BadSession)
    ]
    manifest = dataclasses.replace(manifest, checkpoints=tuple(c for c, _ in sound))
    assert not isinstance(meta, BadSession), "checked"
    return manifest, [*tensors, *(x for _, x in sound), meta]


def _ended(
    whole: Snapshot,
    sound: Snapshot,
    seq_id: int,
    ends: Sequence[Mapping[int, int]],
    *,
    has_states: bool,
) -> Snapshot:
    """A snapshot whose sequence ends before the damage, at a checkpoint, or is gone."""
    if has_states:
        with contextlib.suppress(CannotRewind):
            return edit.cut(sound, seq_id, min(x[seq_id] for x in ends if seq_id in x))
    sound = edit.cut(sound, seq_id, 0)
    # A checkpoint has windows of its own; other groups keep every position.
    kept = [
        x
        for x in whole.checkpoints
        if seq_id in x.seq_ids
        and all(
            tail is not None or x.pos <= of.get(seq_id, x.pos)
            for tail, of in zip(x.tails, ends, strict=True)
        )
    ]
    if not kept:
        return sound
    alone = _at_checkpoint(whole, seq_id, max(kept, key=lambda x: x.pos))
    return join_sequences(sound, alone) if sound.seq_ids else alone


def _at_checkpoint(snapshot: Snapshot, seq_id: int, checkpoint: CheckpointPart) -> Snapshot:
    """One sequence of a snapshot alone, as it was at one of its context checkpoints.

    Windows and states come from the checkpoint, all else from the cells before its position.
    """
    pos, state = checkpoint.pos, checkpoint.state
    history = histories.apply(snapshot.history, Keep(seq_id=seq_id))
    kept = [x for x in snapshot.checkpoints if seq_id in x.seq_ids and x.pos <= pos]
    return dataclasses.replace(
        snapshot,
        groups=tuple(
            _before(part, seq_id, pos) if tail is None else _of_tail(tail, seq_id)
            for part, tail in zip(snapshot.groups, checkpoint.tails, strict=True)
        ),
        states=state and only_state(state, pos - 1, seq_id),
        history=histories.apply(history, Remove(seq_id=seq_id, p0=pos)),
        ga_i={s: min(x, pos) for s, x in snapshot.ga_i.items() if s == seq_id},
        logits={},
        draws={},
        policies={s: x for s, x in snapshot.policies.items() if s == seq_id},
        checkpoints=tuple(dataclasses.replace(x, seq_ids=(seq_id,)) for x in kept),
        in_blocks=tuple(s for s in snapshot.in_blocks if s == seq_id),
    )


def _before(part: GroupPart, seq_id: int, pos: int) -> GroupPart:
    """The cells of a sequence before a position, where a group keeps every position."""
    left = of_sequence(part.seqs, seq_id) & (part.pos < pos)
    kept = some_of_part(part, left)
    return dataclasses.replace(kept, seqs=one_owner(len(kept.pos), seq_id), lost={})


def _of_tail(tail: GroupPart, seq_id: int) -> GroupPart:
    """The cells of a checkpoint as those of a group."""
    n, lost = len(tail.pos), tail.lost.get(0)
    return dataclasses.replace(
        tail,
        seqs=one_owner(n, seq_id),
        lost={seq_id: lost} if lost else {},
        blocks=BlockCells(tail.blocks).in_blocks(np.arange(n)),
    )

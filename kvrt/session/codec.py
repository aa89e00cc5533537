"""From a snapshot to the tensors and the manifest of a session, and back with checks."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import kvrt
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import SavedCells
from kvrt.errors import DAMAGED, BadSession, SaveError
from kvrt.session import checkpoints, described, expected, kv_arrays, owners
from kvrt.session import manifest as manifests
from kvrt.session.divided import Division, joined_pieces, pieces
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.manifest import Blob, GroupEntry, Manifest
from kvrt.session.snapshot import KVBlock, Snapshot, StatePart, block_from, with_kv

# Cells of each group, and the tokens of every sequence.
Cells = tuple[tuple[SavedCells, ...], TokenHistory]


def to_tensors(snapshot: Snapshot) -> list[Tensors]:
    """The blobs of a session: keys and values by group and block, then all else."""
    rows: list[Tensors] = [
        {**kv_arrays.tensors("k", b.k), **kv_arrays.tensors("v", b.v)}
        for g in snapshot.groups
        for b in g.blocks
    ]
    return [*rows, *rest_tensors(snapshot)]


def rest_tensors(snapshot: Snapshot) -> list[Tensors]:
    """The blobs of a session behind its keys and values: states, checkpoints, cells."""
    kept = [checkpoints.checkpoint_tensors(c) for c in snapshot.checkpoints]
    if snapshot.states is None:
        return [*kept, _cells(snapshot)]
    tables = {
        f"{i}.{j}": x for i, layer in enumerate(snapshot.states.tables) for j, x in enumerate(layer)
    }
    return [tables, *kept, _cells(snapshot)]


def manifest(
    snapshot: Snapshot, blobs: Sequence[Blob], divisions: Sequence[Division] = ()
) -> bytes:
    """The manifest of a session.

    Args:
      snapshot: what is saved.
      blobs: in the order of `to_tensors`; in place of each group's blocks its pieces.
      divisions: by group, where devices of a mesh write it.

    Raises:
      SaveError: it would be longer than a reader takes.
    """
    left, divided = iter(blobs), divisions or (None,) * len(snapshot.groups)
    groups = tuple(
        GroupEntry(
            n_cells=g.n_cells,
            head=g.head,
            n_used=len(g.index),
            lost=g.lost,
            blocks=tuple(next(left) for _ in range(x.n_pieces if x else len(g.blocks))),
            division=x,
        )
        for g, x in zip(snapshot.groups, divided, strict=True)
    )
    data = manifests.to_json(
        Manifest(
            version=kvrt.version(),
            fingerprint=snapshot.fingerprint,
            groups=groups,
            held=snapshot.states and snapshot.states.held,
            states=next(left) if snapshot.states else None,
            checkpoints=tuple(map(checkpoints.checkpoint_entry, snapshot.checkpoints, left)),
            n_marks=snapshot.history.n_marks,
            n_tokens={s: _merged(p).shape[1] for s, p in snapshot.history.pieces.items()},
            exact=snapshot.history.exact,
            ga_i=snapshot.ga_i,
            logits={s: pos for s, (pos, _) in snapshot.logits.items()},
            draws=snapshot.draws,
            policy=snapshot.policy,
            policies=snapshot.policies,
            select=snapshot.select,
            in_blocks=snapshot.in_blocks,
            meta=next(left),
        )
    )
    if len(data) > manifests.MAX_BYTES:
        raise SaveError(
            f"the manifest of {len(snapshot.seq_ids)} sequences takes {len(data):,} bytes, "
            f"{manifests.MAX_BYTES:,} at most can be read; save fewer sequences"
        )
    return data


@contextlib.contextmanager
def refused_as_unreadable(path: Path) -> Iterator[None]:
    """Turns what a reader says of a session that was just written into a SaveError."""
    try:
        yield
    except BadSession as error:
        why = str(error).removesuffix(f"; {DAMAGED}")
        raise SaveError(
            f"{path}: what was to be saved cannot be read again: {why}; what was there stays"
        ) from error


def blob_names(found: Manifest) -> list[str]:
    """What each blob is, for messages."""
    names = []
    for g, entry in enumerate(found.groups):
        n_heads = entry.parts.n_heads
        for i, x in enumerate(pieces(entry.parts)):
            heads = f", part {x.head} of {n_heads} of the heads" if n_heads > 1 else ""
            names.append(f"block {i} of group {g} (cells {x.start} to {x.start + x.n - 1}{heads})")
    kept = [f"the checkpoint at position {c.pos}" for c in found.checkpoints]
    return [*names, *(["the states"] if found.states else []), *kept, "the cells"]


def from_tensors(
    found: Manifest, tensors: Sequence[Tensors], checked: Cells | None = None
) -> Snapshot:
    """The snapshot that a session holds.

    Args:
      found: its manifest.
      tensors: its blobs, in the order of `to_tensors`.
      checked: `cells` of the manifest and the last blob, where they are known.

    Raises:
      BadSession: tensors are missing, or have other shapes or values than the manifest says.
    """
    n_kept = len(found.checkpoints)
    *rows, meta = tensors
    rows, kept = rows[: len(rows) - n_kept], rows[len(rows) - n_kept :]
    states = None
    if found.held is not None:
        *rows, tables = rows
        states = StatePart(held=found.held, tables=_tables(tables, found))
    sources, held = cells(found, meta) if checked is None else checked
    left = iter(rows)
    groups = []
    for i, source in enumerate(sources):
        entry = found.groups[i]
        blocks = [_block(next(left), found, i, j) for j in range(len(entry.blocks))]
        if entry.division is not None:
            blocks = joined_pieces(entry.division, blocks)
        groups.append(with_kv(source, blocks))
    return Snapshot(
        fingerprint=found.fingerprint,
        groups=tuple(groups),
        states=states,
        history=held,
        ga_i=found.ga_i,
        logits={s: (pos, _logits(meta, s, found)) for s, pos in found.logits.items()},
        draws=found.draws,
        policy=found.policy,
        policies=found.policies,
        select=found.select,
        checkpoints=tuple(
            checkpoints.checkpoint_part(found, c, x, held)
            for c, x in zip(found.checkpoints, kept, strict=True)
        ),
        in_blocks=found.in_blocks,
    )


def cells(found: Manifest, meta: Tensors) -> Cells:
    """Cells of each group, and the tokens of every sequence.

    Args:
      found: the manifest of a session.
      meta: its last blob.

    Raises:
      BadSession: they contradict each other or the manifest.
    """
    groups = []
    for i, entry in enumerate(found.groups):
        n = entry.n_used
        groups.append(
            SavedCells(
                n_cells=entry.n_cells,
                head=entry.head,
                index=kv_arrays.array(meta, f"{i}.index", (n,), "int32"),
                pos=kv_arrays.array(meta, f"{i}.pos", (n,), "int32"),
                seqs=kv_arrays.array(meta, f"{i}.seqs", (n, None), "uint32"),
                lost=entry.lost,
            )
        )
    held = history_in(found, meta)
    owners.check_cells("the cells", groups, held)
    _check_sequences(found, held)
    return tuple(groups), held


def _cells(snapshot: Snapshot) -> Tensors:
    out = {}
    for i, g in enumerate(snapshot.groups):
        out |= {f"{i}.index": g.index, f"{i}.pos": g.pos, f"{i}.seqs": g.seqs}
    out |= {f"text.{s}": _merged(pieces) for s, pieces in snapshot.history.pieces.items()}
    return out | {f"logits.{s}": x for s, (_, x) in snapshot.logits.items()}


def _merged(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces, axis=1)


def history_in(found: Manifest, meta: Tensors) -> TokenHistory:
    """The tokens of every sequence; raises BadSession for what no vocabulary has."""
    n_vocab = described.n_vocab(found.fingerprint) if found.n_tokens else 0
    pieces = {}
    for s, n in found.n_tokens.items():
        x = kv_arrays.array(meta, f"text.{s}", (3, n), "int32")
        if n and not 0 <= x[1].min() <= x[1].max() < n_vocab:
            raise BadSession(
                f"sequence {s} has tokens from {x[1].min()} to {x[1].max()}, the vocabulary has "
                f"{n_vocab}; {DAMAGED}"
            )
        pieces[s] = (x,)
    return TokenHistory(pieces=pieces, n_marks=found.n_marks, exact=found.exact)


def _check_sequences(found: Manifest, held: TokenHistory) -> None:
    """Refuses what the manifest says of sequences that hold something else, or nothing."""
    ends = {s: int(x[0][0].max()) for s, x in held.pieces.items() if x[0].size}
    wrong = [s for s, n in found.exact.items() if n > found.n_tokens.get(s, -1)]
    wrong += [
        s
        for said in (found.ga_i, found.draws, found.policies)
        for s in said
        if s not in held.pieces
    ]
    wrong += [s for s, pos in found.logits.items() if ends.get(s) != pos]
    newest: dict[int, int] = {}  # position of each state
    for s, states in (found.held or {}).items():
        wrong += [s] * (ends.get(s) != states[-1][0])
        wrong += [s for pos, at in states if newest.setdefault(at, pos) != pos]
    if found.held is not None:
        wrong += sorted(set(ends) - set(found.held))
    n_vocab = described.n_vocab(found.fingerprint) if found.draws else 0
    wrong += [s for s, x in found.draws.items() if x.token is not None and x.token >= n_vocab]
    if wrong:
        raise BadSession(
            f"what is said of sequence {wrong[0]} (its newest position, states, logits or where "
            f"sampling stopped) contradicts its tokens; {DAMAGED}"
        )


def _block(tensors: Tensors, found: Manifest, group: int, block: int) -> KVBlock:
    """Rows, checked against the group's sizes in the fingerprint."""
    wanted = expected.row_block(found, group, block)
    arrays = {name: kv_arrays.array(tensors, name, x.shape, x.dtype) for name, x in wanted.items()}
    return block_from(arrays, found.fingerprint, group)


def _tables(tensors: Tensors, found: Manifest) -> tuple[tuple[np.ndarray, ...], ...]:
    layers = described.state_arrays(found.fingerprint)
    wanted = expected.state_tables(found)
    arrays = {name: kv_arrays.array(tensors, name, x.shape, x.dtype) for name, x in wanted.items()}
    return tuple(
        tuple(arrays[f"{i}.{j}"] for j in range(len(layer))) for i, layer in enumerate(layers)
    )


def _logits(meta: Tensors, seq_id: int, found: Manifest) -> np.ndarray:
    n_vocab = described.n_vocab(found.fingerprint)
    return kv_arrays.array(meta, f"logits.{seq_id}", (n_vocab,), "float32")

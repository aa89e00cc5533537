"""From a snapshot to the tensors and the manifest of a session, and back with checks."""

from collections.abc import Sequence

import numpy as np

import kvrt
from kvrt.cells.text import Text
from kvrt.config import MAX_POS
from kvrt.errors import BadSession
from kvrt.session import manifest as manifests
from kvrt.session import rows as row_kinds
from kvrt.session.blobs import Tensors
from kvrt.session.manifest import Blob, GroupEntry, Manifest
from kvrt.session.snapshot import ROWS, GroupPart, RowBlock, Snapshot, StatePart


def to_tensors(snapshot: Snapshot) -> list[Tensors]:
    """The blobs of a session: row blocks by group, the states if there are any, the cells."""
    rows: list[Tensors] = [
        {**row_kinds.tensors("k", b.k), **row_kinds.tensors("v", b.v)}
        for g in snapshot.groups
        for b in g.blocks
    ]
    if snapshot.states is None:
        return [*rows, _cells(snapshot)]
    tables = {
        f"{i}.{j}": x for i, layer in enumerate(snapshot.states.tables) for j, x in enumerate(layer)
    }
    return [*rows, tables, _cells(snapshot)]


def manifest(snapshot: Snapshot, blobs: Sequence[Blob]) -> bytes:
    """The manifest of a session whose blobs stand in the order of `to_tensors`."""
    left = iter(blobs)
    groups = tuple(
        GroupEntry(
            n_cells=g.n_cells,
            head=g.head,
            n_used=len(g.index),
            lost=g.lost,
            blocks=tuple(next(left) for _ in g.blocks),
        )
        for g in snapshot.groups
    )
    return manifests.to_json(
        Manifest(
            version=kvrt.version(),
            fingerprint=snapshot.fingerprint,
            groups=groups,
            held=snapshot.states and snapshot.states.held,
            states=next(left) if snapshot.states else None,
            n_marks=snapshot.text.n_marks,
            n_tokens={s: _merged(p).shape[1] for s, p in snapshot.text.pieces.items()},
            exact=snapshot.text.exact,
            ga_i=snapshot.ga_i,
            logits={s: pos for s, (pos, _) in snapshot.logits.items()},
            draws=snapshot.draws,
            policy=snapshot.policy,
            meta=next(left),
        )
    )


def blob_names(found: Manifest) -> list[str]:
    """What each blob is, for messages."""
    names = [
        f"block {i} of group {g} (cells {i * ROWS} to {min((i + 1) * ROWS, entry.n_used) - 1})"
        for g, entry in enumerate(found.groups)
        for i in range(len(entry.blocks))
    ]
    return [*names, *(["the states"] if found.states else []), "the cells"]


def from_tensors(found: Manifest, tensors: Sequence[Tensors]) -> Snapshot:
    """The snapshot that a session holds.

    Args:
      found: its manifest.
      tensors: its blobs, in the order of `to_tensors`.

    Raises:
      BadSession: tensors are missing, or have other shapes or values than the manifest says.
    """
    *rows, meta = tensors
    states = None
    if found.held is not None:
        *rows, tables = rows
        states = StatePart(held=found.held, tables=_tables(tables, found))
    left = iter(rows)
    groups = []
    for i, entry in enumerate(found.groups):
        blocks = [next(left) for _ in entry.blocks]
        groups.append(_group(i, entry, blocks, meta, found))
    return Snapshot(
        fingerprint=found.fingerprint,
        groups=tuple(groups),
        states=states,
        text=text(found, meta),
        ga_i=found.ga_i,
        logits={s: (pos, _logits(meta, s, found)) for s, pos in found.logits.items()},
        draws=found.draws,
        policy=found.policy,
    )


def text(found: Manifest, meta: Tensors) -> Text:
    """The tokens of every sequence."""
    if found.n_marks > MAX_POS:
        raise BadSession(f"the text has {found.n_marks} marks, {MAX_POS} at most")
    pieces = {}
    for s, n in found.n_tokens.items():
        x = array(meta, f"text.{s}", (3, n), "int32")
        if n and (x.min() < 0 or x[2].max() >= found.n_marks):
            raise BadSession(f"the tokens of sequence {s} are damaged; save the session again")
        pieces[s] = (x,)
    return Text(pieces=pieces, n_marks=found.n_marks, exact=found.exact)


def array(tensors: Tensors, name: str, shape: tuple[int | None, ...], dtype: str) -> np.ndarray:
    """A tensor, if it has this dtype and shape; None is any size.

    Raises:
      BadSession: it has not, or is missing.
    """
    x = tensors.get(name)
    x = None if x is None else np.asarray(x)
    sizes = x.shape if x is not None and x.ndim == len(shape) else (-1,) * len(shape)
    fits = all(w in (None, n) for n, w in zip(sizes, shape, strict=True))
    if x is None or x.dtype != dtype or not fits:
        what = "missing" if x is None else f"{x.dtype.name}{list(x.shape)}"
        raise BadSession(
            f"tensor {name!r} is {what}, {dtype}{list(shape)} is wanted; the session is damaged"
        )
    return x


def _cells(snapshot: Snapshot) -> Tensors:
    out = {}
    for i, g in enumerate(snapshot.groups):
        out |= {f"{i}.index": g.index, f"{i}.pos": g.pos, f"{i}.seqs": g.seqs}
    out |= {f"text.{s}": _merged(pieces) for s, pieces in snapshot.text.pieces.items()}
    return out | {f"logits.{s}": x for s, (_, x) in snapshot.logits.items()}


def _merged(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces, axis=1)


def _group(
    i: int, entry: GroupEntry, blocks: Sequence[Tensors], meta: Tensors, found: Manifest
) -> GroupPart:
    n = entry.n_used
    index = array(meta, f"{i}.index", (n,), "int32")
    pos = array(meta, f"{i}.pos", (n,), "int32")
    seqs = array(meta, f"{i}.seqs", (n, None), "uint32")
    sound = n == 0 or (
        index[0] >= 0
        and index[-1] < entry.n_cells
        and bool(np.all(np.diff(index) > 0))
        and pos.min() >= 0
        and bool(np.all(seqs.any(axis=1)))
    )
    if not sound or len(blocks) != -(-n // ROWS):
        raise BadSession(f"the cells of group {i} are damaged; save the session again")
    return GroupPart(
        n_cells=entry.n_cells,
        head=entry.head,
        index=index,
        pos=pos,
        seqs=seqs,
        lost=entry.lost,
        blocks=[_block(b, min(ROWS, n - j * ROWS), i, found) for j, b in enumerate(blocks)],
    )


def _block(tensors: Tensors, n: int, group: int, found: Manifest) -> RowBlock:
    """Rows, checked against the group's sizes in the fingerprint."""
    try:
        spec = found.fingerprint["groups"][group]
        shape = (len(spec["layers"]), n, spec["n_kv_heads"], spec["head_dim"])
    except (KeyError, IndexError, TypeError) as error:
        raise BadSession(
            f"the fingerprint does not tell the rows of group {group}; the session is damaged"
        ) from error
    kinds = zip("kv", row_kinds.kinds(found.fingerprint, group), strict=True)
    k, v = (row_kinds.from_tensors(tensors, x, kind.type, shape, array) for x, kind in kinds)
    return RowBlock(k=k, v=v)


def _tables(tensors: Tensors, found: Manifest) -> tuple[tuple[np.ndarray, ...], ...]:
    try:
        spec = found.fingerprint["recurrent"]
        layers, shapes = len(spec["layers"]), [tuple(s) for s in spec["shapes"]]
    except (KeyError, TypeError) as error:
        raise BadSession("the fingerprint does not tell the states' shapes") from error
    n = 1 + max((row for x in (found.held or {}).values() for _, row in x), default=-1)
    return tuple(
        tuple(array(tensors, f"{i}.{j}", (n, *s), "float32") for j, s in enumerate(shapes))
        for i in range(layers)
    )


def _logits(meta: Tensors, seq_id: int, found: Manifest) -> np.ndarray:
    try:
        n_vocab = int(found.fingerprint["model"]["n_vocab"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadSession("the fingerprint does not tell the vocabulary's size") from error
    return array(meta, f"logits.{seq_id}", (n_vocab,), "float32")

"""Takes a snapshot of a runtime's two sides, and puts one into them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from kvrt.arrays import AnyArray
from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache import contents, insert, recurrent
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.insert import Sequences
from kvrt.cellcache.planning import HostCells
from kvrt.config import CacheConfig
from kvrt.errors import BadSequence
from kvrt.policies import Policy
from kvrt.program.batch import pad
from kvrt.program.device import Device
from kvrt.program.programs import Programs
from kvrt.session import rows as kinds
from kvrt.session.change import edit
from kvrt.session.fingerprint import Fingerprint, check, describe, plain
from kvrt.session.snapshot import ROWS, Draw, GroupPart, RowBlock, Snapshot, StatePart
from kvrt.store import kv as kv_store
from kvrt.store.codec import AnyKVArray
from kvrt.store.recurrent import StateStore


def fingerprint(programs: Programs, n_vocab: int, identity: Mapping[str, str]) -> Fingerprint:
    """What a session of this model and cache is told by; raises BadConfig without weights."""
    weights, layout = programs.weights_digest, programs.layout
    return describe(layout.groups, layout.recurrent, programs.config, n_vocab, weights, identity)


def capture(
    host: HostCells,
    device: Device,
    keeper: CellCache,
    told_by: Fingerprint,
    draws: Mapping[int, Draw],
) -> Snapshot:
    """A snapshot of what is there; nothing may be pending.

    Its rows are copies on the device, made there before the next step can overwrite them.
    """
    groups = tuple(_group(i, host, device) for i in range(len(host.groups)))
    ends = {s: host.pos_max(s) for s in host.text.pieces}
    return Snapshot(
        fingerprint=told_by,
        groups=groups,
        states=_states(host, device),
        text=host.text,
        ga_i={s: n for s, n in keeper.extender.reached.items() if s in ends},
        logits={s: (pos, x[0]) for s, (pos, x) in keeper.logits.known(ends).items()},
        draws=dict(draws),
        policy=_policy(keeper.policy),
    )


def fitted(
    snapshot: Snapshot, here: Fingerprint, config: CacheConfig, *, convert: bool
) -> Snapshot:
    """A snapshot that a runtime of this fingerprint can go on with; with `convert` in its types.

    Raises:
      SessionMismatch: it is of another model or cache.
      UsageError: a value has no finite counterpart in this cache's type.
    """
    check(snapshot.fingerprint, here, convert=convert)
    if not convert:
        return snapshot
    return edit.convert(snapshot, config.type_k, config.type_v, hadamard=config.hadamard)


def _policy(policy: Policy | None) -> dict[str, Any] | None:
    return (
        None
        if policy is None
        else {"name": type(policy).__name__, **plain(policy, omit_defaults=True)}
    )


def restore(
    host: HostCells,
    device: Device,
    keeper: CellCache,
    snapshot: Snapshot,
    sequences: Sequences | None,
    n_seq_max: int,
) -> None:
    """Puts a snapshot in place of all there is, or sequences of it in place of some.

    Everything is planned before the first row is written, into cells that hold nothing that is
    kept; then the meaning changes at once.

    Raises:
      BadSequence: a sequence is not in it, or has no place here.
      CacheFull: there are too few cells.
    """
    whole = sequences is None
    held = contents.clear(host.memory) if whole else host.memory
    if sequences is None:
        sequences = {s: s for s in snapshot.seq_ids}
    for s, here in sequences.items():
        _check_sequence(s, here, snapshot, n_seq_max)
        held = contents.rm(held, here)
    new, slots, state_rows = plan(held, snapshot, sequences)
    for i, group in enumerate(snapshot.groups):
        _put(i, group, slots[i], len(new.books[i].cells.pos), device)
    if snapshot.states and new.states:
        _put_states(snapshot.states, state_rows, device)
    host.commit(new)
    if whole:
        keeper.forget()
    names = {here: s for s, here in sequences.items()}
    keeper.restored(names, snapshot.ga_i, snapshot.logits)


def plan(
    held: CacheContents, snapshot: Snapshot, sequences: Sequences
) -> tuple[CacheContents, list[np.ndarray], dict[int, int]]:
    """What is held after a restore, where rows of each group go, and rows of states."""
    new_books, slots = [], []
    for book, part in zip(held.books, snapshot.groups, strict=True):
        book, out = insert.into_book(book, part, sequences)
        new_books.append(book)
        slots.append(out)
    new_states, state_rows = held.states, {}
    if new_states and snapshot.states:
        new_states, state_rows = insert.into_states(new_states, snapshot.states.held, sequences)
    text = insert.into_text(held.text, snapshot.text, sequences)
    return CacheContents(books=tuple(new_books), states=new_states, text=text), slots, state_rows


def _group(i: int, host: HostCells, device: Device) -> GroupPart:
    ledger = host.groups[i]
    cells, book = ledger.cells, ledger.book
    index = np.flatnonzero(cells.pos >= 0).astype(np.int32)
    blocks = []
    for start in range(0, len(index), ROWS):
        part = index[start : start + ROWS]
        k, v = device.take_kv(i, pad(part, ROWS, ledger.extent.n_slots))
        real = slice(len(part))
        blocks.append(RowBlock(k=kinds.some(k, real), v=kinds.some(v, real)))
    return GroupPart(
        n_cells=ledger.extent.n_cells,
        head=book.head,
        index=index,
        pos=np.asarray(cells.pos)[index],
        seqs=np.asarray(cells.seqs)[index],
        lost=dict(book.lost),
        blocks=blocks,
    )


def _states(host: HostCells, device: Device) -> StatePart | None:
    if host.states is None or device.cache.states is None:
        return None
    held, used = recurrent.packed(host.states)
    tables = tuple(tuple(t[used] for t in layer) for layer in device.cache.states.tables)
    return StatePart(held=held, tables=tables)


def _put(group: int, part: GroupPart, slots: np.ndarray, n_cells: int, device: Device) -> None:
    store = device.cache.stores[group]
    for i, block in enumerate(part.blocks):
        here = slots[i * ROWS : (i + 1) * ROWS]
        n = kv_store.n_cells(store)
        # Left out, or behind the last cell: no row of this cache.
        target = pad(np.where(here < n_cells, here, n), ROWS, n)
        device.put_kv(group, target, _whole(block.k), _whole(block.v))


def _whole(rows: AnyKVArray) -> AnyKVArray:
    """Rows, padded to a whole block."""

    def padded(x: AnyArray) -> np.ndarray:
        x = np.asarray(x)
        if x.shape[1] == ROWS:
            return x
        out = np.zeros((x.shape[0], ROWS, *x.shape[2:]), x.dtype)
        out[:, : x.shape[1]] = x
        return out

    return jax.tree.map(padded, rows)


def _put_states(part: StatePart, where: Mapping[int, int], device: Device) -> None:
    assert device.cache.states is not None
    src, dst = (np.array(list(x), np.int32) for x in (where.keys(), where.values()))
    tables = tuple(
        tuple(t.at[dst].set(np.asarray(x)[src]) for t, x in zip(old, new, strict=True))
        for old, new in zip(device.cache.states.tables, part.tables, strict=True)
    )
    device.cache = dataclasses.replace(device.cache, states=StateStore(tables=tables))


def _check_sequence(s: int, here: int, snapshot: Snapshot, n_seq_max: int) -> None:
    if s not in snapshot.seq_ids:
        raise BadSequence(
            f"sequence {s} is not in the session, which holds {list(snapshot.seq_ids)}"
        )
    if not 0 <= here < n_seq_max:
        raise BadSequence(
            f"sequence {here} does not exist here, ids are 0 to {n_seq_max - 1}; raise "
            "n_seq_max, or load it as another one"
        )

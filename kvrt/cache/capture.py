"""Captures a cell cache as a snapshot, and restores one into it."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import AnyArray, Int32, put
from kvrt.cache import checkpoint
from kvrt.cache.cell_cache import CellCache
from kvrt.cache.divided import divided_blocks
from kvrt.cellcache import contents, insert, recurrent
from kvrt.cellcache.blocks import CellCopies
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.insert import Sequences
from kvrt.cells.edits import Remove
from kvrt.cells.slots import pad
from kvrt.errors import BadSequence
from kvrt.options.cache import CacheConfig
from kvrt.policies import AnyPolicy
from kvrt.program.device import Device
from kvrt.program.programs import Programs
from kvrt.session import kv_arrays
from kvrt.session.change import edit
from kvrt.session.fingerprint import (
    Fingerprint,
    check_match,
    describe,
    named_policy,
    plain,
    with_scored,
)
from kvrt.session.snapshot import (
    BLOCK_CELLS,
    GroupPart,
    KVBlock,
    SamplingState,
    Snapshot,
    StatePart,
)
from kvrt.store import kv as kv_store
from kvrt.store.codec import AnyKVArray
from kvrt.store.recurrent import StateStore


def fingerprint(programs: Programs, n_vocab: int, identity: Mapping[str, str]) -> Fingerprint:
    """The fingerprint of sessions of this model and cache; raises BadConfig without weights."""
    weights, layout, config = programs.weights_digest, programs.spec.layout, programs.spec.config
    found = describe(layout.groups, layout.recurrent, config, n_vocab, weights, identity)
    return with_scored(found, layout.scored, config)


def capture(
    cache: CellCache,
    fingerprint: Fingerprint,
    draws: Mapping[int, SamplingState],
    *,
    divided: bool = False,
) -> Snapshot:
    """A snapshot of a cache in which nothing is pending.

    Its keys and values are copies on the device, made there before the next step can overwrite
    them. Those of a mesh are copies on the host, or with `divided` on each of its devices.
    """
    host = cache.host
    ends = {s: host.pos_max(s) for s in host.history.pieces}
    policy = cache.policy or cache.device.layout.policy
    return Snapshot(
        fingerprint=fingerprint,
        groups=tuple(_group(cache, i, divided) for i in range(len(host.groups))),
        states=_states(cache),
        history=host.history,
        ga_i={s: n for s, n in cache.reached.items() if s in ends},
        logits={s: (pos, x[0]) for s, (pos, x) in cache.logits.known(ends).items()},
        draws=dict(draws),
        policy=None if policy is None else _policy(policy, omit_defaults=True),
        policies={s: _policy(cache.policy) for s in ends} if cache.policy else {},
        select=_select(cache),
        checkpoints=checkpoint.parts(host.checkpoints),
        in_blocks=tuple(sorted(host.in_blocks)),
    )


def fitted(
    snapshot: Snapshot, here: Fingerprint, config: CacheConfig, *, convert: bool
) -> Snapshot:
    """A snapshot that a runtime of this fingerprint can resume; with `convert` in its KV dtypes.

    Raises:
      SessionMismatch: it is of another model or cache.
      UsageError: a value has no finite counterpart in this cache's KV dtype.
    """
    check_match(snapshot.fingerprint, here, convert=convert)
    if not convert:
        return snapshot
    return edit.convert(snapshot, config.type_k, config.type_v, hadamard=config.hadamard)


def _policy(policy: AnyPolicy, *, omit_defaults: bool = False) -> dict[str, Any]:
    is_plain = dataclasses.is_dataclass(policy)
    return named_policy(policy, plain(policy, omit_defaults=omit_defaults) if is_plain else {})


def _select(cache: CellCache) -> Mapping[str, Any] | None:
    """Sparse reads that tokens which are not exact may have been computed by; None without any."""
    if not cache.host.history.exact:
        return None
    select = cache.config.select
    return cache.restored_select if select is None else select.said


def restore(cache: CellCache, snapshot: Snapshot, sequences: Sequences | None) -> None:
    """Puts a snapshot in place of everything, or sequences of it in place of some.

    Everything is planned before the first cell is written, into cells that are empty by then;
    then the contents are replaced at once.

    Raises:
      BadSequence: a sequence is not in it, or does not exist here.
      CacheFull: there are too few cells.
    """
    host, whole = cache.host, sequences is None
    before = contents.clear(host.contents) if whole else host.contents
    if sequences is None:
        sequences = {s: s for s in sorted({*snapshot.seq_ids, *snapshot.in_blocks})}
    for s, here in sequences.items():
        _check_sequence(s, here, snapshot, cache.config.n_seq_max)
        before, _ = contents.apply(before, Remove(seq_id=here))
    after = put_sequences(cache, before, snapshot, sequences)
    host.commit(after)
    if whole:
        cache.forget()
    cache.restored_select = snapshot.select or (None if whole else cache.restored_select)
    for s, here in sequences.items():
        cache.logits.forget([here])
        if s in snapshot.logits:
            pos, logits = snapshot.logits[s]
            cache.logits.put(here, pos, jnp.asarray(logits)[None])
        if cache.extend and s in snapshot.ga_i:
            cache.reached[here] = snapshot.ga_i[s]


def put_sequences(
    cache: CellCache, before: CacheContents, snapshot: Snapshot, sequences: Sequences
) -> CacheContents:
    """Writes sequences of a snapshot to cells that are empty in some contents; those after it.

    Raises:
      CacheFull: there are too few cells; nothing was written.
    """
    after, slots, states = plan_restore(before, snapshot, sequences)
    placed = [here for s, here in sequences.items() if s in snapshot.in_blocks]
    after, copies = _in_blocks(cache, after, placed)
    for i, group in enumerate(snapshot.groups):
        _put(i, group, slots[i], len(after.groups[i].cells.pos), cache.device)
    if snapshot.states and after.states:
        _put_states(snapshot.states, states, cache.device)
    for each in copies:
        cache.copy_cells(each)
    if cache.checkpoints is not None:
        after = cache.checkpoints.restored(after, snapshot.checkpoints, sequences)
    return after


def _in_blocks(
    cache: CellCache, after: CacheContents, seq_ids: Iterable[int]
) -> tuple[CacheContents, list[tuple[CellCopies, ...]]]:
    """The contents with sequences in blocks of this cache's size, and the copies that takes.

    Where every cell got its number back, none is copied. Where positions move here they stay in
    cells, as all others do.
    """
    copies = []
    for s in seq_ids if cache.may_lie_in_blocks and cache.host.complete else ():
        after, some = contents.to_blocks(after, s, cache.config.block_size)
        copies.append(some)
    return after, copies


def plan_restore(
    before: CacheContents, snapshot: Snapshot, sequences: Sequences
) -> tuple[CacheContents, list[np.ndarray], dict[int, int]]:
    """The contents after a restore, the cell of each saved cell by group, and state indices."""
    groups, slots = [], []
    for group, part in zip(before.groups, snapshot.groups, strict=True):
        group, out = insert.into_group(group, part, sequences)
        groups.append(group)
        slots.append(out)
    states, indices = before.states, {}
    if states and snapshot.states:
        states, indices = insert.into_states(states, snapshot.states.held, sequences)
    tokens = insert.into_history(before.history, snapshot.history, sequences)
    after = dataclasses.replace(before, groups=tuple(groups), states=states, history=tokens)
    return after, slots, indices


def _group(cache: CellCache, i: int, divided: bool) -> GroupPart:
    indexed = cache.host.groups[i]
    cells, group = indexed.cells, indexed.group
    index = np.flatnonzero(cells.pos >= 0).astype(np.int32)
    return GroupPart(
        n_cells=indexed.extent.n_cells,
        head=group.head,
        index=index,
        pos=np.asarray(cells.pos)[index],
        seqs=np.asarray(cells.seqs)[index],
        lost=dict(group.lost),
        blocks=(divided_blocks if divided else copied_blocks)(cache, i, index),
    )


def copied_blocks(cache: CellCache, group: int, index: Int32[np.ndarray, " n"]) -> list[KVBlock]:
    """Copies of keys and values of some cells of a group, on the device."""
    out = []
    for start in range(0, len(index), BLOCK_CELLS):
        part = index[start : start + BLOCK_CELLS]
        n_slots = cache.host.groups[group].extent.n_slots
        k, v = cache.device.take_kv(group, pad(part, BLOCK_CELLS, n_slots))
        real = slice(len(part))
        out.append(KVBlock(k=kv_arrays.some(k, real), v=kv_arrays.some(v, real)))
    return out


def _states(cache: CellCache) -> StatePart | None:
    states, stored = cache.host.states, cache.device.cache.states
    if states is None or stored is None:
        return None
    kept, used = recurrent.packed(states)
    tables = tuple(tuple(t[used] for t in layer) for layer in stored.tables)
    return StatePart(held=kept, tables=tables)


def _put(group: int, part: GroupPart, slots: np.ndarray, n_cells: int, device: Device) -> None:
    store = device.cache.stores[group]
    for i, block in enumerate(part.blocks):
        here = slots[i * BLOCK_CELLS : (i + 1) * BLOCK_CELLS]
        n = kv_store.n_cells(store)
        # Cells that are left out go behind the last one, where nothing is written.
        target = pad(np.where(here < n_cells, here, n), BLOCK_CELLS, n)
        device.put_kv(group, target, _whole(block.k), _whole(block.v))


def _whole(rows: AnyKVArray) -> AnyKVArray:
    """Rows, padded to a whole block."""

    def padded(x: AnyArray) -> np.ndarray:
        x = np.asarray(x)
        if x.shape[1] == BLOCK_CELLS:
            return x
        out = np.zeros((x.shape[0], BLOCK_CELLS, *x.shape[2:]), x.dtype)
        out[:, : x.shape[1]] = x
        return out

    return jax.tree.map(padded, rows)


def _put_states(part: StatePart, where: Mapping[int, int], device: Device) -> None:
    assert device.cache.states is not None
    src, dst = (np.array(list(x), np.int32) for x in (where.keys(), where.values()))
    tables: Any = tuple(
        tuple(put(t, dst, np.asarray(x)[src]) for t, x in zip(old, new, strict=True))
        for old, new in zip(device.cache.states.tables, part.tables, strict=True)
    )
    device.cache = dataclasses.replace(device.cache, states=StateStore(tables=tables))


def _check_sequence(s: int, here: int, snapshot: Snapshot, n_seq_max: int) -> None:
    if s not in snapshot.seq_ids and s not in snapshot.in_blocks:
        raise BadSequence(
            f"sequence {s} is not in the session, which holds {list(snapshot.seq_ids)}"
        )
    if not 0 <= here < n_seq_max:
        raise BadSequence(
            f"sequence {here} does not exist here, ids are 0 to {n_seq_max - 1}; raise "
            "n_seq_max, or load it as another one"
        )

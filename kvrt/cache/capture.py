"""Captures a cell cache as a snapshot, and restores one into it."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvrt.attention.scored.layers import LayerKinds
from kvrt.cache import checkpoint
from kvrt.cache.cell_cache import CellCache
from kvrt.cache.kv_blocks import copied_blocks, divided_blocks, put_kv_blocks
from kvrt.cellcache import contents, recurrent
from kvrt.cellcache.blocks import CellCopies
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.insert import Sequences, into_history, plan_insert
from kvrt.cells.edits import Remove
from kvrt.errors import BadSequence
from kvrt.options.cache import CacheConfig
from kvrt.policies import AnyPolicy
from kvrt.program.layout import Layout
from kvrt.program.programs import Programs
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
    GroupPart,
    SamplingState,
    Snapshot,
    StatePart,
)


def fingerprint(
    programs: Programs, layers: Layout | LayerKinds, n_vocab: int, identity: Mapping[str, str]
) -> Fingerprint:
    """The fingerprint of sessions of this model and cache; raises BadConfig without weights."""
    weights, config = programs.weights_digest, programs.spec.config
    found = describe(layers.groups, layers.recurrent, config, n_vocab, weights, identity)
    return with_scored(found, layers.scored, config)


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
    saved = snapshot.states
    plan = plan_insert(before, snapshot.groups, saved and saved.held, sequences)
    tokens = into_history(before.history, snapshot.history, sequences)
    after = dataclasses.replace(plan.contents, history=tokens)
    placed = [here for s, here in sequences.items() if s in snapshot.in_blocks]
    after, copies = _in_blocks(cache, after, placed)
    for i, (part, slots) in enumerate(zip(snapshot.groups, plan.slots, strict=True)):
        assert slots is not None, "a snapshot has cells of every group"
        put_kv_blocks(cache.device, i, slots, part.blocks)
    for index, here in plan.states.items():
        assert saved is not None, "a state of it was inserted"
        cache.device.put_state(here, saved.one(index))
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
        blocks=(divided_blocks if divided else copied_blocks)(cache.device, i, index),
    )


def _states(cache: CellCache) -> StatePart | None:
    states, stored = cache.host.states, cache.device.cache.states
    if states is None or stored is None:
        return None
    kept, used = recurrent.packed(states)
    tables = tuple(tuple(t[used] for t in layer) for layer in stored.tables)
    return StatePart(held=kept, tables=tables)


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

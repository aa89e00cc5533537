"""Sessions made of sessions, without a model: cut at a token, or in another KV dtype."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvrt.cellcache import contents, recurrent, window
from kvrt.cellcache import group as groups
from kvrt.cellcache.checkpoint import resume
from kvrt.cellcache.checkpoint.resume import ResumePositions
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.recurrent import RecurrentStates, packed
from kvrt.cellcache.saved import KeptStates
from kvrt.cells.cells import create
from kvrt.cells.edits import Remove
from kvrt.config import MaskSpec
from kvrt.errors import BadSequence, UsageError
from kvrt.kv_types import CODECS, KeyDtypes, KVDtype, KVDtypes
from kvrt.options.cache import CacheConfig
from kvrt.session import described, kv_arrays
from kvrt.session.kv_arrays import KVKind, on_host, stored
from kvrt.session.manifest import Manifest
from kvrt.session.snapshot import (
    CheckpointPart,
    GroupPart,
    KVBlock,
    Snapshot,
    StatePart,
    some_of_part,
)
from kvrt.sizes import types_of
from kvrt.store import codec, hadamard
from kvrt.store.codec import AnyKVArray, Quantized

_encode = jax.jit(codec.encode, static_argnums=2)
_decode = jax.jit(codec.decode, static_argnums=1)


def converted(kv: AnyKVArray, old: KVKind, new: KVKind, group: int) -> AnyKVArray:
    """Keys or values of one kind as another.

    Raises:
      UsageError: a value has no finite counterpart in the type.
      BadConfig: the type's groups do not fill a head.
    """
    if old == new:
        return on_host(kv)
    wide = _wide(kv)
    if old.n_hadamard != new.n_hadamard:
        wide = hadamard.transform(jnp.asarray(wide), old.n_hadamard)
        wide = hadamard.transform(wide, new.n_hadamard)
    if new.type in CODECS:
        out = on_host(_encode(wide, _like(new.type, wide.shape[-1]), -1))
    else:
        with np.errstate(over="ignore"):
            dtype = ml_dtypes.bfloat16 if new.type == "bf16" else stored(new.type)
            out = np.asarray(wide).astype(dtype)
        out = out.view(np.uint16) if new.type == "bf16" else out
    _check_held(np.asarray(wide), out, new.type, group)
    return out


def _wide(kv: AnyKVArray) -> np.ndarray:
    """Keys or values in float32 on the host; only quantized ones need a program, one a shape."""
    kv = on_host(kv)
    if isinstance(kv, Quantized):
        return np.asarray(_decode(kv, -1))
    x = np.asarray(kv)
    return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float32)


@functools.cache
def _like(kv_dtype: KVDtype, n_channels: int) -> codec.KVArray:
    return codec.zeros(kv_dtype, (1, 1, 1, n_channels), 3)


def _check_held(wide: np.ndarray, out: AnyKVArray, kv_dtype: KVDtype, group: int) -> None:
    """Refuses what the dtype made infinite, or cut off."""
    most = float(np.abs(wide).max(initial=0.0))
    if not np.isfinite(most):
        return
    held = np.isfinite(_wide(out)).all()
    if isinstance(out, Quantized) and out.scale.dtype == np.float16:
        held = held and most <= float(np.finfo(np.float16).max)
    if not held:
        raise UsageError(
            f"group {group} holds values up to {most:g}, which {kv_dtype} cannot hold; convert to "
            "bf16"
        )


def reordered(kv: AnyKVArray, order: np.ndarray, n_hadamard: int) -> AnyKVArray:
    """Keys with channels in another order; quantized again, for their groups are others.

    Args:
      kv: on the host.
      order: which channel stands where.
      n_hadamard: size of the Hadamard transform before they were quantized, 0 for none.
    """
    if not isinstance(kv, Quantized):
        return np.asarray(kv)[..., order]
    plain = hadamard.transform(_decode(kv, -1), n_hadamard)[..., order]
    return on_host(_encode(hadamard.transform(plain, n_hadamard), kv, -1))


def cut(snapshot: Snapshot, seq_id: int, p0: int, p1: int | None = None) -> Snapshot:
    """A snapshot without positions [p0, p1) of a sequence, as `seq_rm` would leave it.

    The logits of the sequence go, for its newest token is another one, or may be; so does where
    sampling was left.

    Raises:
      BadSequence: it does not hold the sequence.
      BadRange: the range is negative or reversed.
      CannotRewind: windowed or recurrent layers could not go on from there.
    """
    if seq_id not in snapshot.seq_ids:
        raise BadSequence(f"sequence {seq_id} is not held; found {list(snapshot.seq_ids)}")
    masks = [described.mask(snapshot.fingerprint, i) for i in range(len(snapshot.groups))]
    before = CacheContents(
        groups=tuple(map(_cell_group, snapshot.groups, masks)),
        states=snapshot.states and _states(snapshot.states.held),
        history=snapshot.history,
    )
    new, _ = contents.apply(before, Remove(seq_id=seq_id, p0=p0, p1=p1))
    ga_i = dict(snapshot.ga_i)
    if seq_id in ga_i:
        end = max((groups.n_past(g, seq_id) for g in new.groups), default=0)
        ga_i[seq_id] = min(ga_i[seq_id], end)
    return dataclasses.replace(
        snapshot,
        groups=tuple(map(_part, snapshot.groups, new.groups)),
        states=snapshot.states and new.states and _state_part(snapshot.states, new.states),
        history=new.history,
        ga_i=ga_i,
        logits={s: x for s, x in snapshot.logits.items() if s != seq_id},
        draws={s: x for s, x in snapshot.draws.items() if s != seq_id},
        policies={s: x for s, x in snapshot.policies.items() if s in new.history.pieces},
        checkpoints=_up_to(snapshot.checkpoints, seq_id, p0),
        in_blocks=tuple(s for s in snapshot.in_blocks if s in new.history.pieces),
    )


def convert(
    snapshot: Snapshot, type_k: KeyDtypes, type_v: KVDtypes, *, hadamard: bool | None = None
) -> Snapshot:
    """A snapshot in other KV dtypes, rounded to the nearest; states stay float32.

    Checkpoints stay where the dtypes do; otherwise none is as a fresh read would leave it.

    Args:
      snapshot: of any KV dtypes.
      type_k: of keys, one for all groups or one a group; those quantized by channel become f16.
      type_v: of values, likewise.
      hadamard: whether a Hadamard transform comes before quantizing; None leaves it as it is.

    Raises:
      UsageError: a value has no finite counterpart in the type.
      BadConfig: types that heads, or the number of groups, or the frame of keys do not allow.
    """
    said, groups = snapshot.fingerprint, described.groups(snapshot.fingerprint)
    rotated = bool(said["hadamard"]) if hadamard is None else hadamard
    config = CacheConfig(type_k=type_k, type_v=type_v, hadamard=rotated, rope=said["rope"])
    types_of(groups, config)
    changed = {**said, **kv_arrays.fingerprint_types(config)}
    parts = []
    for i, part in enumerate(snapshot.groups):
        old, new = kv_arrays.kinds(said, i), kv_arrays.kinds(changed, i)
        blocks = [
            KVBlock(
                k=converted(b.k, old[0], new[0], i),
                v=converted(b.v, old[1], new[1], i),
            )
            for b in part.blocks
        ]
        parts.append(dataclasses.replace(part, blocks=blocks))
    kept = snapshot.checkpoints if changed == said else ()
    return dataclasses.replace(snapshot, fingerprint=changed, groups=tuple(parts), checkpoints=kept)


def resume_positions(found: Manifest, seq_id: int) -> ResumePositions:
    """The positions that a sequence of a session can be cut back to."""
    windows = (
        window.resume_gaps(described.mask(found.fingerprint, i), x.lost.get(seq_id, ()))
        for i, x in enumerate(found.groups)
    )
    states = recurrent.resume_gaps(_states(found.held), seq_id) if found.held is not None else ()
    kept = sorted(x.pos for x in found.checkpoints if seq_id in x.seq_ids)
    return resume.of_layers((*itertools.chain(*windows), *states), tuple(kept))


def _up_to(
    checkpoints: Sequence[CheckpointPart], seq_id: int, p0: int
) -> tuple[CheckpointPart, ...]:
    """Checkpoints without those of a sequence beyond a position."""
    out = []
    for x in checkpoints:
        left = tuple(s for s in x.seq_ids if s != seq_id or x.pos <= p0)
        out += [dataclasses.replace(x, seq_ids=left)] if left else []
    return tuple(out)


def _cell_group(part: GroupPart, mask: MaskSpec) -> CellGroup:
    """The used cells alone: a file may speak of any number of empty ones."""
    cells = create(len(part.index), 32 * part.seqs.shape[1])
    cells.pos[:], cells.seqs[:] = part.pos, part.seqs
    head = int(np.searchsorted(part.index, part.head))
    return CellGroup(cells=cells, mask=mask, head=head, rolls=bool(part.lost), lost=part.lost)


def _states(held: Mapping[int, KeptStates]) -> RecurrentStates:
    used = [at for x in held.values() for _, at in x]
    depth = max((len(x) for x in held.values()), default=1)
    return RecurrentStates(n_states=max(used, default=-1) + 1, depth=depth, kept=held)


def _part(part: GroupPart, group: CellGroup) -> GroupPart:
    """A group with the cells that are left."""
    seqs, left = np.asarray(group.cells.seqs), np.asarray(group.cells.pos) >= 0
    # A cell that was freed before the head is where the next search starts.
    freed = np.append(part.index[group.head :], part.n_cells)[0]
    kept = some_of_part(part, left)
    head = min(part.head, int(freed))
    return dataclasses.replace(kept, head=head, seqs=seqs[left], lost=group.lost)


def _state_part(part: StatePart, states: RecurrentStates) -> StatePart:
    """The states that are left, counted anew."""
    held, used = packed(states)
    tables = tuple(tuple(np.asarray(t)[used] for t in layer) for layer in part.tables)
    return StatePart(held=held, tables=tables)

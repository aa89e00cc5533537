"""Keys of a rope="read" cache with RoPE applied, for programs that keep no others."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import Array, Float, Int32
from kvrt.config import GroupSpec, RopeLayout
from kvrt.errors import SessionMismatch
from kvrt.session import kv_arrays
from kvrt.session.change import recode
from kvrt.session.kv_arrays import KVKind
from kvrt.session.snapshot import BLOCK_CELLS, GroupPart, KVBlock, Snapshot
from kvrt.store import rope

_F32 = KVKind(type="f32", n_hadamard=0)


def with_rotated_keys(snapshot: Snapshot, groups: Sequence[GroupSpec], what: str) -> Snapshot:
    """A snapshot as a rope="write" cache would have it: each key rotated to its position.

    The rotation runs in float32 and is rounded to the KV dtype once more; keys of q8_0 are
    quantized again, int8 and the like are not written for others anyway.

    Args:
      snapshot: of either key frame; one whose keys are rotated stays as it is.
      groups: of the model.
      what: the file that is to be written, for a message.

    Raises:
      SessionMismatch: SelfExtend as in the paper, which compares a key with queries in two ways.
    """
    said = snapshot.fingerprint
    if said["rope"] != "read":
        return snapshot
    if (said["self_extend"] or {}).get("kind") == "paper":
        raise SessionMismatch(
            f"{what} holds a key at one position, SelfExtend as in the paper reads it at two; use "
            "SelfExtend in the cache, or none"
        )
    parts = tuple(
        _part(part, group, _n_ctx(said, i), kv_arrays.kinds(said, i)[0], i)
        for i, (part, group) in enumerate(zip(snapshot.groups, groups, strict=True))
    )
    # Keys of windows in checkpoints are not rotated: such checkpoints are not written for others.
    kept = tuple(x for x in snapshot.checkpoints if all(tail is None for tail in x.tails))
    changed = {**said, "rope": "write"}
    return dataclasses.replace(snapshot, fingerprint=changed, groups=parts, checkpoints=kept)


def _n_ctx(said: Mapping[str, Any], group: int) -> int:
    """Cells of the cache, of groups whose frequencies depend on it; 0 of others."""
    return int((said["groups"][group]["rope"] or {}).get("n_ctx") or 0)


def _part(part: GroupPart, group: GroupSpec, n_ctx: int, kind: KVKind, number: int) -> GroupPart:
    """A group with its keys rotated, block by block."""
    if group.rope is None:
        return part
    spec = group.rope
    freqs, scale = jnp.asarray(rope.frequencies(spec, n_ctx)), rope.magnitude(spec, n_ctx)
    blocks = []
    for i, block in enumerate(part.blocks):
        wide = jnp.asarray(recode.converted(block.k, kind, _F32, number))
        pos = jnp.asarray(part.pos[i * BLOCK_CELLS :][:BLOCK_CELLS])
        k = np.asarray(_rotated(wide, pos, freqs, jnp.float32(scale), spec.layout))
        blocks.append(KVBlock(k=recode.converted(k, _F32, kind, number), v=block.v))
    return dataclasses.replace(part, blocks=blocks)


@functools.partial(jax.jit, static_argnames="layout")
def _rotated(
    k: Float[Array, "L n H D"],
    pos: Int32[Array, " n"],
    freqs: Float[Array, " R"],
    scale: Float[Array, ""],
    layout: RopeLayout,
) -> Float[Array, "L n H D"]:
    """Keys of all layers at their positions, times the magnitude of the rule."""
    cos, sin = (x * scale for x in rope.angles(freqs, pos))
    return jax.vmap(lambda layer: rope.rotate(layer, cos, sin, layout))(k)

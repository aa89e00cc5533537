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
from kvrt.session.change import edit
from kvrt.session.kv_arrays import KVKind
from kvrt.session.snapshot import CheckpointPart, GroupPart, KVBlock, Snapshot
from kvrt.store import rope
from kvrt.store.quantized import AnyKVArray

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
    if (said["self_extend"] or {}).get("kind") == "paper":
        raise SessionMismatch(
            f"{what} holds a key at one position, SelfExtend as in the paper reads it at two; use "
            "SelfExtend in the cache, or none"
        )
    if said["rope"] != "read":
        return snapshot
    by_group = [
        _Keys(group, _n_ctx(said, i), kv_arrays.kinds(said, i)[0], i)
        for i, group in enumerate(groups)
    ]
    both = zip(snapshot.groups, by_group, strict=True)
    return dataclasses.replace(
        snapshot,
        fingerprint={**said, "rope": "write"},
        groups=tuple(_part(part, keys) for part, keys in both),
        checkpoints=tuple(_checkpoint(x, by_group) for x in snapshot.checkpoints),
    )


@dataclasses.dataclass(frozen=True)
class _Keys:
    """How keys of a group are rotated.

    Attributes:
      group: of the model.
      n_ctx: cells of the cache where frequencies depend on it.
      kind: of the keys.
      number: of the group, for messages.
    """

    group: GroupSpec
    n_ctx: int
    kind: KVKind
    number: int

    def rotated(self, k: AnyKVArray, pos: Int32[np.ndarray, " n"]) -> AnyKVArray:
        """Keys at their positions."""
        spec = self.group.rope
        if spec is None:
            return k
        freqs = jnp.asarray(rope.frequencies(spec, self.n_ctx))
        scale = jnp.float32(rope.magnitude(spec, self.n_ctx))
        wide = jnp.asarray(edit.converted(k, self.kind, _F32, self.number))
        found = np.asarray(_rotated(wide, jnp.asarray(pos), freqs, scale, spec.layout))
        return edit.converted(found, _F32, self.kind, self.number)


def _n_ctx(said: Mapping[str, Any], group: int) -> int:
    """Cells of the cache, of groups whose frequencies depend on it; 0 of others."""
    return int((said["groups"][group]["rope"] or {}).get("n_ctx") or 0)


def _part(part: GroupPart, keys: _Keys) -> GroupPart:
    """A group with its keys rotated, block by block."""
    pos = np.split(part.pos, np.cumsum([block.n for block in part.blocks[:-1]], dtype=int))
    both = zip(part.blocks, pos, strict=False)
    blocks = [KVBlock(k=keys.rotated(block.k, at), v=block.v) for block, at in both]
    return dataclasses.replace(part, blocks=blocks)


def _checkpoint(part: CheckpointPart, by_group: Sequence[_Keys]) -> CheckpointPart:
    """A checkpoint with the keys of its windows rotated."""
    tails = tuple(
        tail and _part(tail, keys) for tail, keys in zip(part.tails, by_group, strict=True)
    )
    return dataclasses.replace(part, tails=tails)


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

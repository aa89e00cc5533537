"""The K-shift: rotates stored keys by their pending position change, once, in place.

RoPE composes, R(p + d) = R(d) R(p), so moving a token costs one rotation and no new evaluation.
Changes are summed in `delta` and applied together: on bf16 keys 64 one-token rotations err 30
times as much as one of 64 tokens. The rotation never rescales: YaRN's magnitude was applied when
the key was written.

Source: arXiv:2104.09864, sec. 3.2; llama.cpp `build_rope_shift`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Int32, namespace, state
from kvrt.cells import Cells
from kvrt.config import GroupSpec
from kvrt.store import per_channel, rope, tile
from kvrt.store.codec import Quantized, decode, encode
from kvrt.store.hadamard import size_k, transform_block
from kvrt.store.kv import KVStore, n_parts, put_part, take_part
from kvrt.store.per_channel import KeyArray, PerChannel


@state
class ShiftPlan:
    """Blocks with a moved cell come first in `blocks`; delta is by block and cell."""

    delta: Int32[AnyArray, "N B"]
    blocks: Int32[AnyArray, " N"]
    n_blocks: Int32[AnyArray, ""]


def plan_shift(cells: Cells, n_blocks: int, block_size: int) -> ShiftPlan:
    """Which blocks to rotate by what, on the host or inside jit."""
    xp = namespace(cells.delta)
    lacking = n_blocks * block_size - cells.delta.shape[0]
    delta = cells.delta
    if lacking:
        delta = xp.concat([delta, xp.zeros(lacking, dtype=xp.int32)])
    return _of_blocks(xp.reshape(delta, (n_blocks, block_size)))


def _of_blocks(delta: Int32[AnyArray, "N B"]) -> ShiftPlan:
    xp = namespace(delta)
    moved = xp.any(delta != 0, axis=1)
    order = xp.argsort(xp.astype(~moved, xp.int32), stable=True)
    n = xp.sum(xp.astype(moved, xp.int32), dtype=xp.int32)
    return ShiftPlan(delta=delta, blocks=xp.astype(order, xp.int32), n_blocks=xp.asarray(n))


def in_blocks_of(plan: ShiftPlan, mine: Bool[AnyArray, " N"]) -> ShiftPlan:
    """The part of a plan in some blocks: what others move is left to others."""
    xp = namespace(plan.delta)
    delta = xp.where(mine[:, None], plan.delta, 0)
    return _of_blocks(delta)


def apply_shift(
    store: KVStore, plan: ShiftPlan, group: GroupSpec, n_ctx: int, hadamard: bool = False
) -> KVStore:
    """Rotates the keys of moved cells; every other byte of the store stays as it is.

    The cost follows the blocks with a moved cell. Cosines and sines are computed once a block for
    all layers.

    Args:
      store: donated by the jitted caller.
      plan: from `plan_shift`; the caller sets the cells' delta to zero.
      group: the layers' spec; without RoPE their keys stay as they are.
      n_ctx: cells of the cache, as used when the keys were written.
      hadamard: quantized keys were Hadamard-transformed before.
    """
    spec = group.rope
    if spec is None:
        return store
    freqs = jnp.asarray(rope.frequencies(spec, n_ctx))
    tables = rope.block_tables(freqs, plan.delta, plan.blocks, plan.n_blocks)
    parts = 1 if isinstance(store.k[0], PerChannel) else n_parts(store.k[0])

    def rotate(i: Array, keys: tuple[KeyArray, ...]) -> tuple[KeyArray, ...]:
        block, part = plan.blocks[lax.div(i, jnp.int32(parts))], lax.rem(i, jnp.int32(parts))
        cos, sin = (table[block] for table in tables)
        moved = plan.delta[block] != 0

        def rotated(k: KeyArray) -> KeyArray:
            if isinstance(k, PerChannel):
                keys = rope.rotate_block(tile.keys(k, block[None]), cos, sin, spec.layout)
                return per_channel.replace_keys(k, block, keys, moved)
            old = take_part(k, block, part, parts)
            n = size_k(group.dim_k, hadamard and isinstance(k, Quantized))
            keys = transform_block(decode(jax.tree.map(lambda x: x[0], old), -2), n)
            keys = rope.rotate_block(keys, cos, sin, spec.layout)
            new = encode(transform_block(keys, n)[None], old, -2)
            # Cells that do not move are not quantized again.
            new = jax.tree.map(functools.partial(jnp.where, moved), new, old)
            return put_part(k, new, block, part)

        return tuple(map(rotated, keys))

    keys = lax.fori_loop(0, plan.n_blocks * parts, rotate, store.k)
    return dataclasses.replace(store, k=keys)


def settle(cells: Cells) -> Cells:
    """The cells with nothing pending, after `apply_shift` or where keys are stored unrotated."""
    return dataclasses.replace(cells, delta=namespace(cells.delta).zeros_like(cells.delta))

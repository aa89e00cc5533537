"""What a kernel runs over: block lists, once, or twice where positions are grouped."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Float, Int32
from kvrt.attention.pallas import common
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView
from kvrt.config import MaskSpec


@dataclasses.dataclass(frozen=True)
class Side:
    """One way in which tokens are compared: their queries and keys, what they see, and how."""

    q: Float[Array, "T Q D"]
    k: Float[Array, "T H D"]
    view: AnyView
    how: LayerAttention


def sides_of(qkv: TokenQKV, view: AnyView, how: LayerAttention) -> list[Side]:
    """What a kernel runs over; two where positions are grouped, for it rotates a key once.

    Near pairs are those of a window, compared by exact positions; the others are what is seen from
    as far back as the window is wide.
    """
    if how.grouped is None or qkv.grouped is None:
        return [Side(qkv.q, qkv.k, view, how)]
    w = how.grouped.ga_w
    window = dataclasses.replace(how.group, mask=MaskSpec(kind="window", size=w))
    near = dataclasses.replace(how, group=window, grouped=None)
    beyond = dataclasses.replace(how, rope=how.grouped.rope, grouped=None)
    back = dataclasses.replace(view, pos=jnp.asarray(view.pos) - w)
    return [Side(qkv.q, qkv.k, view, near), Side(*qkv.grouped, back, beyond)]


def over_lists(
    kernel: common.Kernel,
    sides: Sequence[Side],
    kvs: Sequence[LayerKV],
    lists: Int32[AnyArray, "S M"],
    n_blocks: Int32[AnyArray, " S"],
) -> tuple[common.KernelWork, common.Sums]:
    """Sums over block lists, those of all sides beside each other as those of splits are."""
    works = [
        common.kernel_work(x.q, x.k.shape[1], x.view, lists, n_blocks, x.how.group.mask)
        for x in sides
    ]
    sums = [kernel.sums(work, kv, x.how) for work, kv, x in zip(works, kvs, sides, strict=True)]
    return works[0], jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *sums)

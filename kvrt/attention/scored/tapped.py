"""Looks at what layers compare, in programs of their own: steps that serve pay nothing for it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention import softmax
from kvrt.attention.api import attend
from kvrt.attention.step_attention import StepAttention
from kvrt.attention.types import AttendArgs
from kvrt.cells import mask
from kvrt.store.codec import decode
from kvrt.store.per_channel import PerChannel

# Makes of what `attend` is going to be given something to look at.
Tap = Callable[[AttendArgs], Array]


class TappedAttend:
    """The `Attend` of a step that shows what its layers are given; readers of others show none.

    `seen` is by layer what the tap makes of it.
    """

    def __init__(self, of_step: StepAttention, tap: Tap):
        """Nothing is seen yet."""
        self._of_step, self._tap, self.seen = of_step, tap, dict[int, Array]()

    def __call__(self, layer: int, q: Array, k: Any, v: Any, *, sinks: Any = None) -> Array:
        """As of the step, shown before."""
        here = self._of_step.layers[layer]
        if here.read is None and k is not None and v is not None:
            args = self._of_step.arguments(here, here.parts[0], q, k, v, sinks)
            self.seen[layer] = self._tap(args)
        return self._of_step(layer, q, k, v, sinks=sinks)

    def produce(self, layer: int, k: Array, v: Any) -> None:
        """As of the step."""
        self._of_step.produce(layer, k, v)

    def index(self, layer: int, q: Array, k: Array, weights: Array) -> None:
        """As of the step."""
        self._of_step.index(layer, q, k, weights)

    def for_tokens(self, ids: Array) -> Any:
        """As of the step: of layers that keep none."""
        return self._of_step.for_tokens(ids)

    def recur(self, *args: Any, **rest: Any) -> Any:
        """As of the step."""
        return self._of_step.recur(*args, **rest)


def cell_sums(args: AttendArgs) -> Float[Array, " C"]:
    """Probabilities that a step's queries give each cached cell, summed over queries and heads.

    Each is exp(score - log-sum-exp) of a softmax over cells and the step's own tokens; the products
    are made anew, for all cells, so it is for a few queries.

    Args:
      args: of `kvrt.attention.attend`, with keys as they are compared and plain or quantized by
        cell.
    """
    qkv, kv, view, how = args
    assert not isinstance(kv.k, PerChannel), "refused where cells are chosen"
    keys, group = decode(kv.k, -2), how.group
    n_tokens, n_q, d = qkv.q.shape
    n_kv = keys.shape[1]
    by_head = qkv.q.astype(jnp.float32).reshape(n_tokens, n_kv, n_q // n_kv, d)
    lse = attend(*args)[1].reshape(n_tokens, n_kv, n_q // n_kv)
    s = jnp.einsum("thgd,nhdb->thgnb", by_head, keys) * jnp.float32(group.score_scale)
    s = softmax.capped(s, group.soft_cap).reshape(n_tokens, n_kv, n_q // n_kv, -1)
    pos = jnp.asarray(view.cell_pos).reshape(-1)
    seqs = jnp.asarray(view.cell_seqs).reshape(pos.shape[0], -1)
    sees = mask.visible(group.mask, pos, seqs, jnp.asarray(view.pos), jnp.asarray(view.bits))
    p = jnp.where(sees[:, None, None], jnp.exp(s - lse[..., None]), 0.0)
    return jnp.sum(p, axis=(0, 1, 2))

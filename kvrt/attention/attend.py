"""The one place that chooses how attention is computed, and the object a model calls in a step."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float, Shaped
from kvrt.attention import grouped, rotation
from kvrt.attention.chunked import attend_chunked
from kvrt.attention.reference import attend_reference
from kvrt.attention.view import View
from kvrt.config import CacheConfig, GroupSpec, Implementation
from kvrt.store.store import KVStore

_IMPLEMENTATIONS = {"chunked": attend_chunked, "reference": attend_reference}


# Jitted inside the step as well: layers of one group are traced once, which halves the start.
@functools.partial(jax.jit, static_argnames=("group", "implementation"))
def attend(
    q: Float[Array, "T Q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    k_rows: Shaped[Array, "N H D B"],
    v_rows: Shaped[Array, "N H B D"],
    sight: View,
    group: GroupSpec,
    turn: rotation.Rotation | None = None,
    far: grouped.Far | None = None,
    *,
    sinks: Float[Array, " Q"] | None = None,
    implementation: str = "chunked",
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention of T tokens over stored rows and over themselves, one softmax.

    Args:
      q: queries turned to their positions; head h reads kv head h // (Q / H).
      k: the tokens' own keys, turned.
      v: the tokens' own values.
      k_rows: key rows of the layer.
      v_rows: value rows of the layer.
      sight: the tokens' positions and owners and the blocks to read.
      group: mask, scale and soft cap.
      turn: turns stored keys that are kept raw; None where no key needs it.
      far: the tokens at grouped positions, for SelfExtend; None compares all by their positions.
      sinks: a logit a head that takes weight and gives no value.
      implementation: "chunked" (runtime loop over blocks) or "reference" (all cells at once).

    Returns:
      The output [T, Q, D] in q's dtype and the log-sum-exp [T, Q] in float32, so that results
      over disjoint cells can be merged.

    Raises:
      NotImplementedError: an implementation of that name does not exist.
    """
    if implementation not in _IMPLEMENTATIONS:
        names = ", ".join(_IMPLEMENTATIONS)
        raise NotImplementedError(f"attention {implementation!r} does not exist; one of {names}")
    compute = _IMPLEMENTATIONS[implementation]
    return compute(q, k, v, k_rows, v_rows, sight, group, turn, far, sinks)


@dataclasses.dataclass
class StepAttention:
    """The `Attend` of one step: rotates, attends, and keeps the rows to be written afterwards.

    Lives while a step is traced. `k_new` and `v_new` hold, by layer, the rows in the form in which
    they are stored.
    """

    store: KVStore
    view: View
    by_layer: dict[int, GroupSpec]
    turns: dict[int, rotation.Rotation | None]
    far: dict[int, grouped.FarTurns]
    raw_keys: bool
    implementation: Implementation
    k_new: dict[int, Array] = dataclasses.field(default_factory=dict)
    v_new: dict[int, Array] = dataclasses.field(default_factory=dict)

    def __call__(
        self, layer: int, q: Array, k: Array, v: Array, *, sinks: Array | None = None
    ) -> Array:
        """Attention output of one layer; see `kvrt.attention.contract.Attend`."""
        turn, far = self.turns[layer], self.far.get(layer)
        q = _tempered(q, self.view, self.by_layer[layer])
        turned = k if turn is None else turn.tokens(k)
        out, _ = attend(
            q if turn is None else turn.tokens(q),
            turned,
            v,
            self.store.k[layer],
            self.store.v[layer],
            self.view,
            self.by_layer[layer],
            turn if self.raw_keys else None,
            far.far(q, k) if far else None,
            sinks=sinks,
            implementation=self.implementation,
        )
        self.k_new[layer] = k if self.raw_keys else turned
        self.v_new[layer] = v
        return out


def _tempered(q: Array, view: View, group: GroupSpec) -> Array:
    """Queries as long as their positions want them; a token of padding keeps its length."""
    if group.temperature is None:
        return q
    at, pos = group.temperature, jnp.maximum(jnp.asarray(view.pos), 0).astype(jnp.float32)
    growth = jnp.log1p(jnp.floor((pos + 1.0) / at.floor_scale)) * at.attn_scale + 1.0
    return q * growth.astype(q.dtype)[:, None, None]


def step_attention(
    store: KVStore, view: View, groups: Sequence[GroupSpec], config: CacheConfig
) -> StepAttention:
    """Attention over `store` for the tokens of `view`; RoPE tables are made once a group."""
    raw = config.rope == "read"
    turns: dict[int, rotation.Rotation | None] = {}
    far: dict[int, grouped.FarTurns] = {}
    for group in groups:
        near, extend = view, config.self_extend
        if group.rope and extend and grouped.extends(group, config):
            if len(view.pos) == 1:
                near = grouped.for_one_query(view, extend)
            else:
                beyond = grouped.far_turns(group.rope, view, config.n_ctx, extend)
                far |= dict.fromkeys(group.layers, beyond)
        table = group.rope and rotation.make(group.rope, near, config.n_ctx, raw_keys=raw)
        turns |= dict.fromkeys(group.layers, table)
    return StepAttention(
        store=store,
        view=view,
        by_layer={layer: g for g in groups for layer in g.layers},
        turns=turns,
        far=far,
        raw_keys=raw,
        implementation=config.attention,
    )

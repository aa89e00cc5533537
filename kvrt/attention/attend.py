"""Attention over the rows of a layer, and the object that a model calls in a step."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention import grouped, rotation, sharded
from kvrt.attention.contract import Inputs, Outputs, Step
from kvrt.attention.implementations import named
from kvrt.attention.view import RowView, View
from kvrt.config import CacheConfig, GroupSpec, Implementation
from kvrt.errors import NoKernel
from kvrt.store import hadamard, recurrent
from kvrt.store.codec import Coded, Rows
from kvrt.store.per_channel import KeyRows, PerChannel
from kvrt.store.store import KVStore


# Jitted inside the step as well: layers of one group are traced once, which halves the start.
@functools.partial(jax.jit, static_argnames=("group", "implementation"))
def attend(
    q: Float[Array, "T Q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    k_rows: KeyRows,
    v_rows: Rows,
    sight: View | RowView,
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
      sight: the tokens' positions and owners and the blocks to read; with a `RowView` each token
        is one of another sequence, and reads blocks of its own.
      group: mask, scale and soft cap.
      turn: turns stored keys that are kept raw; None where no key needs it.
      far: the tokens at grouped positions, for SelfExtend; None compares all by their positions.
      sinks: a logit a head that takes weight and gives no value.
      implementation: "chunked" (runtime loop over blocks), "reference" (all cells at once), or a
        kernel: "pallas_gpu", "pallas_tpu"; with "_interpret" added a kernel's program runs as XLA
        operations on any device, for tests.

    Returns:
      The output [T, Q, D] in q's dtype and the log-sum-exp [T, Q] in float32, so that results
      over disjoint cells can be merged.

    Raises:
      NoKernel: an implementation of that name does not exist, or cannot serve these
        rows.
    """
    if sight.shards is not None:

        def on_one(*args: Any) -> tuple[Array, Array]:
            *first, turn, far, sinks = args
            kept = {"sinks": sinks, "implementation": implementation}
            return attend(*first, group, turn, far, **kept)

        return sharded.attend(on_one, q, k, v, k_rows, v_rows, sight, turn, far, sinks)
    if isinstance(k_rows, PerChannel) and implementation not in ("chunked", "reference"):
        raise NoKernel(
            f"attention {implementation!r} does not read keys that are coded by channel; use "
            "attention='chunked', or keys of another type"
        )
    of_list, of_rows = named(implementation)
    if isinstance(sight, RowView):
        assert far is None, "rows compare all keys by their positions"
        return of_rows(q, k, v, k_rows, v_rows, sight, group, turn, sinks)
    return of_list(q, k, v, k_rows, v_rows, sight, group, turn, far, sinks)


@dataclasses.dataclass(frozen=True)
class Sight:
    """What some tokens of a step see in a group's layers; RoPE tables are made once for all."""

    view: View | RowView
    turn: rotation.Rotation | None
    far: grouped.FarTurns | None

    @property
    def n_tokens(self) -> int:
        """How many tokens."""
        return self.view.pos.shape[0]


@dataclasses.dataclass(frozen=True)
class LayerSight:
    """The rows of one layer, and what it shares with its group: the sight of each part's tokens."""

    group: GroupSpec
    parts: tuple[Sight, ...]
    k_rows: KeyRows
    v_rows: Rows
    # Channels that turn together before keys and values are coded, 0 for none.
    n_turn_k: int = 0
    n_turn_v: int = 0


@dataclasses.dataclass
class StepAttention:
    """The `Attend` of one step: rotates, attends, and keeps the rows to be written afterwards.

    Lives while a step is traced. `k_new` and `v_new` hold, by layer, the rows in the form in which
    they are stored, `states` the tables of recurrent layers, advanced as soon as a layer has run.
    """

    layers: dict[int, LayerSight]
    states: dict[int, recurrent.Tables]
    rows: recurrent.StateRows | None
    raw_keys: bool
    implementation: Implementation
    k_new: dict[int, Array] = dataclasses.field(default_factory=dict)
    v_new: dict[int, Array] = dataclasses.field(default_factory=dict)

    def __call__(
        self, layer: int, q: Array, k: Array, v: Array, *, sinks: Array | None = None
    ) -> Array:
        """Attention output of one layer; see `kvrt.attention.contract.Attend`."""
        here = self.layers[layer]
        k, v = _moved_damage(k, hadamard.turn(v, here.n_turn_v))
        found, start = [], 0
        for sight in here.parts:
            at = slice(start, start + sight.n_tokens)
            # A step of one part, as most are, takes its tokens as they come.
            part = (q, k, v) if len(here.parts) == 1 else (q[at], k[at], v[at])
            found.append(self._part(here, sight, *part, sinks))
            start = at.stop
        out, keys = (x[0] if len(x) == 1 else jnp.concatenate(x) for x in zip(*found, strict=True))
        self.k_new[layer], self.v_new[layer] = keys, v
        return hadamard.turn(out, here.n_turn_v)

    def _part(
        self, here: LayerSight, sight: Sight, q: Array, k: Array, v: Array, sinks: Array | None
    ) -> tuple[Array, Array]:
        """Attention output of some tokens, and their keys as they are stored."""
        turn, far = sight.turn, sight.far
        q = _tempered(q, sight.view, here.group)
        turned = hadamard.turn(k if turn is None else turn.tokens(k), here.n_turn_k)
        out, _ = attend(
            hadamard.turn(q if turn is None else turn.tokens(q), here.n_turn_k),
            turned,
            v,
            here.k_rows,
            here.v_rows,
            sight.view,
            here.group,
            turn if self.raw_keys else None,
            far.far(q, k) if far else None,
            sinks=sinks,
            implementation=self.implementation,
        )
        return out, k if self.raw_keys else turned

    def recur(self, layer: int, step: Step[Outputs], inputs: Inputs) -> Outputs:
        """Outputs of a recurrence of one layer; see `kvrt.attention.contract.Attend`."""
        assert self.rows is not None, "a recurrent layer that the model's `recurrent` lacks"
        self.states[layer], out = recurrent.advance(self.states[layer], self.rows, step, inputs)
        return out


def _moved_damage(k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values with NaN keys and zero values where a head's values are not finite.

    0 * NaN is NaN, so such a value would reach every query of a product with one that sees it,
    those of other sequences too. A NaN key reaches those alone that see it, for scores are masked.
    """
    sound = jnp.all(jnp.isfinite(v), axis=2, keepdims=True)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0.0)


def _tempered(q: Array, view: View | RowView, group: GroupSpec) -> Array:
    """Queries as long as their positions want them; a token of padding keeps its length."""
    if group.temperature is None:
        return q
    at, pos = group.temperature, jnp.maximum(jnp.asarray(view.pos), 0).astype(jnp.float32)
    growth = jnp.log1p(jnp.floor((pos + 1.0) / at.floor_scale)) * at.attn_scale + 1.0
    return q * growth.astype(q.dtype)[:, None, None]


def step_attention(
    stores: Sequence[KVStore],
    views: Sequence[Sequence[View | RowView]],
    groups: Sequence[GroupSpec],
    config: CacheConfig,
    states: dict[int, recurrent.Tables],
    rows: recurrent.StateRows | None,
) -> StepAttention:
    """One step over the stores and states of all layers.

    Args:
      stores: rows by group; the i-th layer of a group has the i-th arrays of its store.
      views: by group, what each part of the step's tokens sees, in the tokens' order.
      groups: attention layers.
      config: key frame, implementation, SelfExtend.
      states: tables by recurrent layer.
      rows: rows of states that the tokens read and write.
    """
    layers: dict[int, LayerSight] = {}
    for store, parts, group in zip(stores, views, groups, strict=True):
        sights = tuple(_sight(view, group, config) for view in parts)
        for layer, k, v in zip(group.layers, store.k, store.v, strict=True):
            coded = [config.hadamard and isinstance(x, Coded) for x in (k, v)]
            layers[layer] = LayerSight(
                group=group,
                parts=sights,
                k_rows=k,
                v_rows=v,
                n_turn_k=hadamard.size_k(group.head_dim, coded[0]),
                n_turn_v=hadamard.size_v(group.head_dim, coded[1]),
            )
    return StepAttention(
        states=states,
        rows=rows,
        layers=layers,
        raw_keys=config.rope == "read",
        implementation=config.attention,
    )


def _sight(view: View | RowView, group: GroupSpec, config: CacheConfig) -> Sight:
    near, far, extend = view, None, config.self_extend
    if isinstance(view, View) and group.rope and extend and grouped.extends(group, config):
        if len(view.pos) == 1:
            near = grouped.for_one_query(view, extend)
        else:
            far = grouped.far_turns(group.rope, view, config.n_ctx, extend)
    raw = config.rope == "read"
    turn = rotation.make(group.rope, near, config.n_ctx, raw_keys=raw) if group.rope else None
    return Sight(view=view, turn=turn, far=far)

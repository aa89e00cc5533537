"""Which layers of a model keep tokens by score: they become layers with a state.

Only the newest of a text can be read back from such a layer, as from a recurrent one, and both are
kept, copied and saved in the same way.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from kvrt.attention.scored.policy import ScoredPolicy
from kvrt.attention.scored.spec import SlotSpec
from kvrt.attention.scored.split import divided_recurrence, layer_shapes
from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.errors import BadConfig
from kvrt.files.class_source import class_identity
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt.options.cache import CacheConfig
from kvrt.sizes import types_of
from kvrt.state_arrays import StateArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """A group whose layers keep tokens by score: slots by layer, in the order of its layers."""

    group: GroupSpec
    slots: tuple[SlotSpec, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKinds:
    """The layers of a model by what keeps them.

    Attributes:
      groups: attention layers in cells.
      recurrent: layers with a state, those by score among them; None without any.
      config: of the cache, with the KV dtypes of `groups`.
      scored: attention layers by score.
    """

    groups: tuple[GroupSpec, ...]
    recurrent: RecurrentSpec | None
    config: CacheConfig
    scored: tuple[ScoredGroup, ...] = ()


def by_kind(
    groups: Sequence[GroupSpec],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    policy: ScoredPolicy | None,
    n_q_heads: Mapping[int, int],
) -> LayerKinds:
    """The layers of a model, of which those that see every position keep tokens by score.

    Windows and chunks keep their own rule. That these layers can is asked before, by `kvrt.cache`.

    Args:
      groups: of the model.
      recurrent: of the model.
      config: of the cache.
      policy: None leaves all as it is.
      n_q_heads: query heads by layer; needed where the policy's tap has queries.

    Raises:
      BadConfig: a policy of one's own does not give a score for each token.
    """
    if policy is None:
        return LayerKinds(groups=tuple(groups), recurrent=recurrent, config=config)
    how = policy, n_q_heads
    types, is_full = types_of(groups, config), [g.mask.kind == "full" for g in groups]
    n_layers = sum(len(g.layers) for g, full in zip(groups, is_full, strict=True) if full)
    budgets = iter(policy.budgets(n_layers))
    scored = tuple(
        _scored(group, of, dict(zip(group.layers, budgets, strict=False)), config.n_ctx, how)
        for group, of, full in zip(groups, types, is_full, strict=True)
        if full
    )
    if class_identity(type(policy)).get("module"):
        for x in scored:
            _check_scores(x.slots[0])
    kept = [of for of, full in zip(types, is_full, strict=True) if not full]
    type_k, type_v = zip(*kept, strict=True) if kept else ((types[0][0],), (types[0][1],))
    same = [
        x if isinstance(x, str) else y
        for x, y in ((config.type_k, type_k), (config.type_v, type_v))
    ]
    return LayerKinds(
        groups=tuple(g for g, full in zip(groups, is_full, strict=True) if not full),
        recurrent=_with_states(recurrent, scored),
        config=dataclasses.replace(config, type_k=same[0], type_v=same[1]),
        scored=scored,
    )


def _scored(
    group: GroupSpec,
    types: tuple[KeyDtype, KVDtype],
    budgets: Mapping[int, int],
    n_ctx: int,
    how: tuple[ScoredPolicy, Mapping[int, int]],
) -> ScoredGroup:
    """A group with budgets by layer; `how` is the policy, and query heads by layer."""
    policy, n_q_heads = how
    slots = (
        SlotSpec(
            group=dataclasses.replace(group, layers=(layer,)),
            policy=policy,
            budget=budgets[layer],
            type_k=types[0],
            type_v=types[1],
            # Else the same programs do for any size.
            n_ctx=n_ctx if group.rope is not None and group.rope.by_length else 0,
            n_q_heads=n_q_heads[layer] if policy.observed_by.queries else 0,
        )
        for layer in group.layers
    )
    return ScoredGroup(group=group, slots=tuple(map(_with_parts, slots)))


def _with_parts(spec: SlotSpec) -> SlotSpec:
    """Slots of a layer, divided as the policy divides its heads."""
    group = spec.group
    parts = tuple(
        (
            heads,
            dataclasses.replace(
                spec, budget=n, group=dataclasses.replace(group, n_kv_heads=len(heads))
            ),
        )
        for heads, n in spec.policy.split(group.layers[0], group.n_kv_heads)
    )
    if parts and spec.policy.head_share < 1:
        raise BadConfig(
            f"{type(spec.policy).__name__} says which heads keep more, and head_share leaves that "
            "to scores; use one of the two"
        )
    if parts and spec.n_q_heads:
        raise BadConfig(
            f"{type(spec.policy).__name__} divides heads and asks for sums of queries, which are "
            "of all heads; use one of the two"
        )
    return dataclasses.replace(spec, parts=parts)


def _check_scores(spec: SlotSpec) -> None:
    """Traces some tokens and an eviction, so that a wrong policy is refused before any step."""
    n_kv, dim, n_tokens = spec.group.n_kv_heads, spec.group.head_dim, 3
    n_q = spec.n_q_heads or 2 * n_kv
    heads = (n_q, dim), (n_kv, dim), (n_kv, spec.group.dim_v), (n_q, dim)
    rows = [jax.ShapeDtypeStruct((n_tokens, *x), np.float32) for x in heads]
    pos, n = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((n_tokens,), ()))
    inputs = (*rows[:3], pos, *(rows[3:] if spec.n_q_heads else ()))
    tables = tuple(jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in layer_shapes(spec))
    jax.eval_shape(divided_recurrence(spec, None)[1], tables, n, inputs, n)


def _with_states(recurrent: RecurrentSpec | None, scored: Sequence[ScoredGroup]) -> RecurrentSpec:
    """All layers with a state, ascending."""
    own = dict(zip(recurrent.layers, recurrent.arrays, strict=True)) if recurrent else {}
    for group in scored:
        own |= {i: _arrays(x) for i, x in zip(group.group.layers, group.slots, strict=True)}
    layers = tuple(sorted(own))
    return RecurrentSpec(layers=layers, by_layer=tuple(own[i] for i in layers))


def _arrays(slots: SlotSpec) -> tuple[StateArray, ...]:
    return tuple(StateArray(shape=x.shape, dtype=x.dtype.name) for x in layer_shapes(slots))

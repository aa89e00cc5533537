"""What the runtime refuses before anything is planned or dispatched."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from kvrt.arrays import TokenIds
from kvrt.config import MAX_POS, GroupSpec, RecurrentSpec, layer_traits
from kvrt.drafts.drafter import Speculation
from kvrt.errors import BadConfig, BadRange, BadToken, CacheFull
from kvrt.kv_types import any_by_channel
from kvrt.options.cache import CacheConfig
from kvrt.options.compose import Traits, check_together
from kvrt.policies import AnyPolicy, policy_traits
from kvrt.program.layout import Layout
from kvrt.sizes import types_of


def settled(model: Any, config: Any, policy: Any) -> CacheConfig:
    """The config with this platform's KV dtypes for "auto", of a model that can be run.

    Raises:
      BadConfig: `model` is no decoder, `config` no `CacheConfig`, or `policy` no policy.
    """
    if not isinstance(model, nnx.Module):
        raise BadConfig(
            f"the model is of type {type(model).__name__}; give a flax.nnx module with the members "
            "of kvrt.Decoder, such as kvrt.load(name).decoder"
        )
    lacking = [x for x in ("groups", "recurrent", "n_vocab") if not hasattr(model, x)]
    lacking += [] if callable(model) else ["__call__"]
    if lacking:
        raise BadConfig(
            f"the model {type(model).__name__} lacks {', '.join(lacking)}; kvrt.Decoder says what "
            "each is"
        )
    if not isinstance(config, CacheConfig):
        raise BadConfig(f"the config is of type {type(config).__name__}; give a kvrt.CacheConfig")
    if policy is not None and not isinstance(policy, AnyPolicy):
        raise BadConfig(
            f"the policy is of type {type(policy).__name__}; give one of kvrt.policies, or an "
            "object with the members of kvrt.Policy"
        )
    return config.for_platform(jax.default_backend())


def together(
    groups: Sequence[GroupSpec],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    policy: AnyPolicy | None,
    *others: Traits,
) -> None:
    """Refuses a cache of things that do not go together: the door of Runtime, Engine and commands.

    Args:
      groups: attention layers of a model.
      recurrent: its layers with a state.
      config: sizes and types.
      policy: by position or by score.
      others: traits of an engine, and of a mesh.

    Raises:
      BadConfig: a rule of `kvrt.options.compose` forbids them.
    """
    layers = layer_traits(groups, recurrent, config.select.n_dense if config.select else 0)
    for group, (type_k, _) in zip(groups, types_of(groups, config), strict=True):
        if group.mask.kind == "full" and any_by_channel(type_k):
            layers["full keys by channel"] = type_k
    check_together(config.traits, layers, policy_traits(policy), *others)


def token_ids(tokens: TokenIds, n_vocab: int) -> np.ndarray:
    """The tokens as int32[T].

    Raises:
      BadToken: no tokens, or an id outside the vocabulary.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise BadToken("tokens must be a list of at least one integer id")
    if ids.min() < 0 or ids.max() >= n_vocab:
        bad = int(ids[(ids < 0) | (ids >= n_vocab)][0])
        raise BadToken(f"token id {bad} is not in [0, {n_vocab}), the model's vocabulary")
    return ids.astype(np.int32)


def out_ids(wanted: Sequence[int] | None, n_tokens: int) -> list[int]:
    """Ascending indices of the tokens whose logits are wanted; None is the last one.

    Raises:
      BadToken: none, out of order, or outside the tokens.
    """
    ids = [n_tokens - 1] if wanted is None else list(wanted)
    if ids != sorted(set(ids)) or any(not 0 <= i < n_tokens for i in ids) or not ids:
        raise BadToken(f"out_ids must be ascending indices in [0, {n_tokens}), at least one")
    return ids


def step_size(n_tokens: int, n_ubatch: int) -> None:
    """Refuses a step of more tokens than a step may have.

    Raises:
      BadToken: there are too many.
    """
    if n_tokens > n_ubatch:
        raise BadToken(f"{n_tokens} tokens in one step, the limit is {n_ubatch}; raise n_ubatch")


def last_pos(pos: int) -> None:
    """Refuses a sequence that would end beyond the greatest position.

    Raises:
      BadRange: it would.
    """
    if pos > MAX_POS:
        raise BadRange(f"position {pos} exceeds the limit {MAX_POS}; shift the sequence down")


def n_keep(n_keep: int, n_ctx: int) -> None:
    """Refuses a context shift that would have nothing to drop.

    Raises:
      BadConfig: it keeps too many.
    """
    if n_keep > n_ctx - 2:
        raise BadConfig(
            f"n_keep is {n_keep}, which leaves nothing to drop in {n_ctx} cells; keep fewer"
        )


def free_cells(n: int, n_free: int, n_ctx: int, *, shifts: bool) -> None:
    """Refuses tokens for which there are too few cells.

    Raises:
      CacheFull: n exceeds n_free.
    """
    if n > n_free:
        raise CacheFull(
            f"{n} tokens need {n} cells, {n_free} of {n_ctx} are free; "
            f"{'raise' if shifts else 'turn on context shift or raise'} n_ctx"
        )


def drafts(spec: Speculation, config: CacheConfig, layout: Layout, n_vocab: int) -> None:
    """Refuses drafts that a step cannot verify as single steps would.

    Raises:
      BadConfig: a round is longer than a step, or tokens that share a position; keys share scales
        over tokens, latents are rounded in the cache, reads are sparse, or the drafter is of
        another model.
    """
    n = spec.n_draft + 1
    if n > config.n_ubatch:
        raise BadConfig(
            f"n_draft is {spec.n_draft}, and a step of {n} tokens exceeds n_ubatch "
            f"{config.n_ubatch}; lower the one or raise the other"
        )
    check_together(spec.traits, config.traits, layer_traits(layout.groups, layout.recurrent))
    extend = config.self_extend
    if "rounded" in config.traits and extend and extend.kind == "paper" and n > extend.ga_w:
        raise BadConfig(
            f"a round of {n} tokens is longer than ga_w {extend.ga_w}, beyond which SelfExtend "
            "has tokens share positions; lower n_draft"
        )
    spec.drafter.check(n_vocab)

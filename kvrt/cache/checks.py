"""What the runtime refuses before anything is planned or dispatched."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from kvrt.arrays import TokenIds
from kvrt.config import MAX_POS, GroupSpec
from kvrt.drafts.drafter import Speculation
from kvrt.errors import BadConfig, BadRange, BadToken, CacheFull
from kvrt.kv_types import any_by_channel
from kvrt.options.cache import CacheConfig, SelfExtend
from kvrt.policies import AnyPolicy


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
    states: Any = model.recurrent  # pyright: ignore[reportAttributeAccessIssue]
    if config.on_states == "keep" and states is None:
        raise BadConfig("on_states is 'keep', and the model has no recurrent layers; leave it out")
    return config.for_platform(jax.default_backend())


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


def recurrent_layers(config: CacheConfig, *, attends: bool) -> None:
    """Refuses a policy by position where layers are recurrent, unless states are to be kept.

    Raises:
      BadConfig: they are not, or no layer has attention.
    """
    if config.on_states == "refuse" or not attends:
        remedy = " (or set on_states to 'keep')" if attends else ""
        raise BadConfig(
            "a context shift or another policy takes positions out of a sequence, which the state "
            f"of recurrent layers cannot forget; do without it and raise n_ctx{remedy}"
        )


def drafts(
    spec: Speculation, config: CacheConfig, groups: Sequence[GroupSpec], n_vocab: int
) -> None:
    """Refuses drafts that a step cannot verify as single steps would.

    Raises:
      BadConfig: a round is longer than a step, keys share scales over tokens, latents or positions
        that are shared are rounded in the cache, an indexer chooses what is read, or the drafter
        is of another model.
    """
    n = spec.n_draft + 1
    if n > config.n_ubatch:
        raise BadConfig(
            f"n_draft is {spec.n_draft}, and a step of {n} tokens exceeds n_ubatch "
            f"{config.n_ubatch}; lower the one or raise the other"
        )
    if any_by_channel(config.type_k):
        raise BadConfig(
            f"keys of {config.type_k} share scales by tokens: a group is quantized between two "
            "tokens, of which a round's later ones would see it as it was before; use another "
            "type of keys, or no drafts"
        )
    if config.select is not None:
        raise BadConfig(
            "a round reads all cells for several tokens, and select lets single steps read some: "
            "with drafts the text would be another; leave one of them out"
        )
    _check_rounded(n, config, groups)
    spec.drafter.check(n_vocab)


def _check_rounded(n: int, config: CacheConfig, groups: Sequence[GroupSpec]) -> None:
    """Refuses rounds of n tokens that see each other as a cache would not have them."""
    types = {config.type_k, config.type_v}
    if types == {"f32"}:
        return
    if any(group.latent_rank for group in groups):
        raise BadConfig(
            "the tokens of a round see each other's latents as they were computed, single steps as "
            f"a cache of {', '.join(sorted(types))} has them; use f32, or no drafts"
        )
    extend = config.self_extend
    if extend and extend.kind == "paper" and n > extend.ga_w:
        raise BadConfig(
            f"a round of {n} tokens is longer than ga_w {extend.ga_w}, beyond which SelfExtend "
            "has tokens share positions; lower n_draft"
        )


def self_extend(extend: SelfExtend, groups: Sequence[GroupSpec], *, shifts: bool) -> None:
    """Refuses SelfExtend where positions are not its own to choose.

    Raises:
      BadConfig: a context shift moves them as well, or layers cannot see beyond a window.
    """
    if extend.kind == "cache" and not groups:
        raise BadConfig(
            "SelfExtend of kind 'cache' has no positions to divide, for all layers are recurrent; "
            "do without it"
        )
    if extend.kind == "cache" and shifts:
        raise BadConfig("SelfExtend and a context shift both move positions; choose one of them")
    own = [g.layers[0] for g in groups if g.mask.kind != "full" or g.rope is None]
    if own and (extend.kind == "cache" or len(own) == len(groups)):
        raise BadConfig(
            f"SelfExtend of kind {extend.kind!r} cannot reach layers that see a window of their "
            f"own or have no positions, the first is {own[0]}; use a model without such layers"
            f"{'' if len(own) == len(groups) else ', or the kind paper'}"
        )

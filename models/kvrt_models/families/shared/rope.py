"""RoPE of a header: of a config.json as transformers reads it, of a GGUF as llama.cpp does."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from kvrt.config import RopeSpec
from kvrt.errors import BadConfig, BadModelFile, UnsupportedModel
from kvrt_models.families.shared.family import MAX_HEAD_DIM
from kvrt_models.header import REMEDY, Header, brief

# RoPE scaling by transformers' names, and ours.
_SCALINGS = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "dynamic": "dynamic_ntk",
    "yarn": "yarn",
    "longrope": "longrope",
}
# What families know that take any of transformers' rules.
ANY = tuple(_SCALINGS)
Layout = Literal["neox", "norm"]


def rope_of(
    keys: Header,
    head_dim: int,
    *,
    known: tuple[str, ...] = ANY,
    part: float | None = None,
    layout: Layout = "neox",
    gguf_layout: Layout = "neox",
) -> RopeSpec:
    """RoPE of models with one set of rules for all their layers.

    Args:
      keys: of the model.
      head_dim: channels of a head.
      known: transformers' names of the scalings that the family may use.
      part: of a head that is rotated where a config.json says nothing; None is all, whatever it
        says.
      layout: pairs of channels in a folder.
      gguf_layout: likewise in a GGUF.

    Raises:
      UnsupportedModel: another scaling, or rules that differ by kind of layer.
      BadModelFile: a number is missing or impossible.
    """
    if keys.tensors is not None:
        return _gguf_rope(keys, head_dim, gguf_layout)
    rules = rope_rules(keys)
    if any(isinstance(value, Mapping) for value in rules.values.values()):
        raise UnsupportedModel("RoPE that differs by kind of layer is not supported; only one rule")
    return read_rope(keys, rules, head_dim, known=known, part=part, layout=layout)


def rope_rules(keys: Header) -> Header:
    """The rules of a config.json, as older or newer files name them."""
    rules = keys.inner("rope_scaling")
    return rules if rules.values else keys.inner("rope_parameters")


def rope_kind(rules: Header, arch: str, known: tuple[str, ...]) -> str:
    """Transformers' name of a scaling, the first where the rules have none.

    Raises:
      UnsupportedModel: it is not known.
    """
    kind = rules.text("rope_type", rules.text("type", known[0]))
    if kind not in known:
        raise UnsupportedModel(
            f"RoPE scaling {brief(kind)} of {arch} is not supported; one of {', '.join(known)}"
        )
    return kind


def read_rope(
    keys: Header,
    rules: Header,
    head_dim: int,
    *,
    known: tuple[str, ...],
    part: float | None = None,
    layout: Layout = "neox",
) -> RopeSpec:
    """RoPE as transformers reads it from one set of rules; see `rope_of`.

    Raises:
      UnsupportedModel: a scaling that is not known.
      BadModelFile: a number is missing or impossible.
    """
    scaling = _SCALINGS[rope_kind(rules, keys.arch, known)]
    rules.only("mrope_section")
    base = rules.number("rope_theta", keys.number("rope_theta", 10000.0))
    if part is not None:
        part = rules.number("partial_rotary_factor", keys.number("partial_rotary_factor", part))
        return make_rope(n_rot=int(head_dim * part), base=base, layout=layout)
    # Such a family rotates whole heads in transformers.
    for source in (keys, rules):
        source.only("partial_rotary_factor", 1.0)
    rule = {} if scaling == "none" else _rule(keys, rules, scaling, head_dim // 2)
    rule = {"n_ctx_orig": keys.whole("max_position_embeddings")} | rule
    return make_rope(n_rot=head_dim, base=base, scaling=scaling, layout=layout, **rule)


def near_rope(keys: Header, rope: RopeSpec) -> RopeSpec:
    """RoPE of windowed layers, for which a GGUF may name a base of their own."""
    if keys.tensors is None:
        return rope
    return dataclasses.replace(rope, base=keys.number("rope.freq_base_swa", rope.base))


def make_rope(**rules: Any) -> RopeSpec:
    """A `RopeSpec` of a header's numbers; impossible ones are a BadModelFile."""
    try:
        rope = RopeSpec(**rules)
    except BadConfig as error:
        raise BadModelFile(f"the header describes an impossible RoPE: {error}; {REMEDY}") from error
    if rope.beta_fast < rope.beta_slow or (rope.scaling == "yarn" and rope.base <= 1.0):
        raise BadModelFile(
            f"the header describes an impossible YaRN: base {rope.base}, beta_fast "
            f"{rope.beta_fast}, beta_slow {rope.beta_slow}; the base must be above 1 and beta_fast "
            f"not below beta_slow; {REMEDY}"
        )
    return rope


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's growth of the attention with the factor of the stretch."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _rule(keys: Header, rules: Header, scaling: str, n_pairs: int) -> dict[str, Any]:
    """What a rule needs beside the base; linear and dynamic know only the trained length."""
    if scaling in ("linear", "dynamic_ntk"):
        return dict(factor=rules.number("factor"))
    name, trained = "original_max_position_embeddings", keys.whole("max_position_embeddings")
    original = keys.whole(name, rules.whole(name, trained))
    if scaling == "llama3":
        low, high = rules.number("low_freq_factor"), rules.number("high_freq_factor")
        if low >= high:
            raise BadModelFile(f"low_freq_factor {low} must be below {high}, the high; {REMEDY}")
        return dict(
            factor=rules.number("factor"),
            n_ctx_orig=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = rules.number("factor", trained / original)
    rule: dict[str, Any] = dict(factor=factor, n_ctx_orig=original)
    if scaling == "longrope":
        for ours, theirs in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
            rule[ours] = rules.numbers(theirs, n_pairs)
    else:
        rule |= _yarn(rules, factor)
    given = rules.has("attention_factor")
    return rule | (dict(magnitude=rules.number("attention_factor")) if given else {})


def _yarn(rules: Header, factor: float) -> dict[str, Any]:
    over, under = (rules.number(x, 0.0, zero=True) for x in ("mscale", "mscale_all_dim"))
    ratio = yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
    return dict(
        beta_fast=rules.number("beta_fast", 32.0, zero=True) or 32.0,
        beta_slow=rules.number("beta_slow", 1.0, zero=True) or 1.0,
        truncate=rules.flag("truncate", True),
        # One of the two alone has no effect in transformers.
        magnitude=ratio if over > 0 and under > 0 else None,
    )


def _gguf_rope(keys: Header, head_dim: int, layout: Layout) -> RopeSpec:
    """RoPE as llama.cpp reads it, where a factor without a type is linear.

    YaRN's ramp is the file's own, see `departures`.
    """
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"RoPE scaling {brief(kind)} of this GGUF is not supported; only none, linear or yarn"
        )
    old = keys.number("rope.scale_linear", 0.0, zero=True)
    factor = keys.number("rope.scaling.factor", old, zero=True) or 1.0
    growth = yarn_magnitude(factor) if kind == "yarn" else 1.0
    n_rot = keys.whole("rope.dimension_count", head_dim, most=MAX_HEAD_DIM)
    _check_factors(keys, n_rot)
    trained = keys.whole("max_position_embeddings")
    return make_rope(
        n_rot=n_rot,
        base=keys.number("rope_theta", 10000.0),
        layout=layout,
        scaling=kind if factor != 1.0 else "none",
        factor=1.0 if kind == "none" else factor,
        n_ctx_orig=keys.whole("rope.scaling.original_context_length", 0, least=0) or trained,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        magnitude=growth * keys.number("rope.scaling.attn_factor", 1.0),
    )


def _check_factors(keys: Header, n_rot: int) -> None:
    """Refuses divisors of frequencies that are not read, or do not fit."""
    tensors = keys.tensors or {}
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in tensors:
            raise UnsupportedModel(
                f"LongRoPE (tensor {name!r}) of a GGUF is not supported; load the model's Hugging "
                "Face folder"
            )
    found = tensors.get("rope_freqs.weight")
    if found is not None and found.shape != (n_rot // 2,):
        raise BadModelFile(
            f"'rope_freqs.weight' has shape {found.shape}, {(n_rot // 2,)} is wanted; {REMEDY}"
        )

"""RoPE of a Hugging Face config.json, as transformers reads it."""

from collections.abc import Mapping
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import spec
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


def shared_rope(
    keys: Header, head_dim: int, *, base: float = 10000.0, known: tuple[str, ...] = ANY
) -> RopeSpec:
    """RoPE of models with one set of rules for all their layers.

    Args:
      keys: of the model.
      head_dim: channels of a head, all rotated.
      base: of models that name none.
      known: names of the scalings that the family may use.

    Raises:
      UnsupportedModel: another scaling, or rules that differ by kind of layer.
      BadModelFile: a number is missing or impossible.
    """
    rules = keys.inner("rope_scaling")
    if not rules.values:
        rules = keys.inner("rope_parameters")
    if any(isinstance(value, Mapping) for value in rules.values.values()):
        raise UnsupportedModel("RoPE that differs by kind of layer is not supported; only one rule")
    base = rules.number("rope_theta", keys.number("rope_theta", base))
    return read_rope(keys, rules, base, head_dim, known)


def read_rope(
    keys: Header, rules: Header, base: float, head_dim: int, known: tuple[str, ...]
) -> RopeSpec:
    """RoPE as transformers reads it from one set of rules.

    Raises:
      UnsupportedModel: a scaling that is not known.
      BadModelFile: a number is missing or impossible.
    """
    kind = rules.text("rope_type", rules.text("type", "default"))
    if kind not in known:
        raise UnsupportedModel(
            f"RoPE scaling {brief(kind)} of config.json is not supported; one of {', '.join(known)}"
        )
    rules.only("mrope_section")
    # None of these families rotates a part of a head in transformers.
    for source in (keys, rules):
        source.only("partial_rotary_factor", 1.0)
    trained = keys.whole("max_position_embeddings")
    scaling = _SCALINGS[kind]
    rule = {} if scaling == "none" else _rule(keys, rules, scaling, head_dim // 2)
    return spec.make_rope(
        n_rot=head_dim, base=base, scaling=scaling, **({"n_ctx_orig": trained} | rule)
    )


def plain_rope(keys: Header, head_dim: int, family: str, part: float) -> RopeSpec:
    """The plain rule on a part of each head; `rope_scaling` is how older files name the rules.

    Args:
      keys: of config.json.
      head_dim: channels of a head.
      family: that knows no other rule, for the message.
      part: of a head that is rotated, where the file says nothing.

    Raises:
      UnsupportedModel: the file has another rule.
    """
    rules = keys.inner("rope_scaling")
    if not rules.values:
        rules = keys.inner("rope_parameters")
    kind = rules.text("rope_type", rules.text("type", "default"))
    if kind != "default":
        raise UnsupportedModel(
            f"RoPE scaling {brief(kind)} of {family} is not supported; only default"
        )
    part = rules.number("partial_rotary_factor", keys.number("partial_rotary_factor", part))
    base = rules.number("rope_theta", keys.number("rope_theta", 10000.0))
    return spec.make_rope(n_rot=int(head_dim * part), base=base)


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
        rule |= dict(
            short_factors=rules.numbers("short_factor", n_pairs),
            long_factors=rules.numbers("long_factor", n_pairs),
        )
    else:
        rule |= _yarn(rules, factor)
    return rule | (
        dict(magnitude=rules.number("attention_factor")) if rules.has("attention_factor") else {}
    )


def _yarn(rules: Header, factor: float) -> dict[str, Any]:
    fast = rules.number("beta_fast", 32.0, zero=True) or 32.0
    slow = rules.number("beta_slow", 1.0, zero=True) or 1.0
    over = rules.number("mscale", 0.0, zero=True)
    under = rules.number("mscale_all_dim", 0.0, zero=True)
    # One of the two alone has no effect in transformers.
    both = over > 0 and under > 0
    ratio = spec.yarn_magnitude(factor, over) / spec.yarn_magnitude(factor, under)
    return dict(
        beta_fast=fast,
        beta_slow=slow,
        truncate=rules.flag("truncate", True),
        magnitude=ratio if both else None,
    )

"""Families with recurrent layers, from the metadata of a GGUF file as llama.cpp reads it."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import Header
from kvrt_models.layers.ssm import SsmSpec
from kvrt_models.spec import DecoderSpec, Experts, Layers

# Bamba goes by the name of granitehybrid.
ARCHS = ("mamba", "mamba2", "jamba", "granitehybrid")
_MAX_SIZE = 1 << 24


def recurrent_spec_from_gguf(
    keys: Header, arch: str, tensors: Mapping[str, Any], n_vocab: int
) -> DecoderSpec:
    """Reads the spec of one of `ARCHS`.

    Args:
      keys: the metadata, asked for what is the architecture's own.
      arch: architecture.
      tensors: tensor descriptions by name; says what is tied and what has a bias.
      n_vocab: rows of the embedding.

    Raises:
      UnsupportedModel: the file asks for what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    n_layers = keys.whole("block_count", most=spec.MAX_LAYERS)
    shared: dict[str, Any] = dict(
        arch=arch,
        n_vocab=n_vocab,
        n_embd=keys.whole("embedding_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        n_ctx_train=keys.whole("context_length"),
        tied="output.weight" not in tensors,
        qk_norm=False,
    )
    if arch in ("mamba", "mamba2"):
        none: dict[str, Any] = dict(
            n_ff=0, n_heads=0, qkv_bias=False, out_bias=False, ffn_bias=False
        )
        ssm = _ssm(keys, arch, tuple(range(n_layers)), tensors)
        return DecoderSpec(groups=(), ssm=ssm, **none, **shared)
    return _hybrid(keys, arch, tensors, n_layers, shared)


def _hybrid(
    keys: Header, arch: str, tensors: Mapping[str, Any], n_layers: int, shared: dict[str, Any]
) -> DecoderSpec:
    """Layers without kv heads are recurrent, the others have attention."""
    n_embd, n_heads = shared["n_embd"], keys.by_layer("attention.head_count", n_layers, least=0)
    head_dim = spec.head_dim_of(keys, "attention.key_length", n_embd, max(*n_heads, 1))
    for key, value in {"attention.value_length": head_dim, "attention.causal": True}.items():
        keys.only(key, value)
    kv_heads = keys.by_layer("attention.head_count_kv", n_layers, n_heads, least=0)
    n_ff = keys.by_layer("feed_forward_length", n_layers)
    attention = tuple(i for i, n in enumerate(kv_heads) if n)
    rest = tuple(i for i, n in enumerate(kv_heads) if not n)
    of_layer = f"blk.{attention[0]}." if attention else ""
    rope = None if arch == "jamba" else _rope(keys, tensors, head_dim)
    return spec.build(
        layers=[Layers(ids=attention, rope=rope)],
        n_ff=n_ff,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=f"{of_layer}attn_q.bias" in tensors,
        out_bias=f"{of_layer}attn_output.bias" in tensors,
        ffn_bias="blk.0.ffn_gate.bias" in tensors,
        experts=_experts(keys, arch, tensors, n_ff),
        ssm=_ssm(keys, arch, rest, tensors) if rest else None,
        **(_granite(keys) if arch == "granitehybrid" else {}),
        **shared,
    )


def _experts(
    keys: Header, arch: str, tensors: Mapping[str, Any], widths: Sequence[int]
) -> Experts | None:
    """Mixtures in the layers that have a router; Granite's stand beside a shared network."""
    layers = tuple(i for i in range(len(widths)) if f"blk.{i}.ffn_gate_inp.weight" in tensors)
    if not layers:
        return None
    n_ff = {widths[i] for i in layers}
    if len(n_ff) > 1:
        raise UnsupportedModel(
            f"{arch} with experts of {len(n_ff)} widths in its layers is not supported; only of one"
        )
    n_experts = keys.whole("expert_count", most=spec.MAX_EXPERTS)
    granite = arch == "granitehybrid"
    return Experts(
        layers=layers,
        n_experts=n_experts,
        n_used=keys.whole("expert_used_count", most=n_experts),
        n_ff=n_ff.pop(),
        scoring="softmax" if granite else "share",
        n_ff_shared=keys.whole("expert_shared_feed_forward_length", 0, least=0) if granite else 0,
    )


def _granite(keys: Header) -> dict[str, Any]:
    """Granite's multipliers; Bamba has none, and 0 means none."""
    return dict(
        scale=keys.number("attention.scale", 0.0, zero=True) or None,
        embed_scale=keys.number("embedding_scale", 0.0, zero=True) or 1.0,
        residual_scale=keys.number("residual_scale", 0.0, zero=True) or 1.0,
        logit_divisor=keys.number("logit_scale", 0.0, zero=True) or 1.0,
    )


def _rope(keys: Header, tensors: Mapping[str, Any], head_dim: int) -> RopeSpec | None:
    """The plain rule, on pairs of neighbours; a key of its own turns it off."""
    if not keys.flag("rope.scaling.finetuned", True):
        return None
    keys.only("rope.scaling.type", "none")
    for key in ("rope.scale_linear", "rope.scaling.factor"):
        keys.only(key, 0.0, 1.0)
    keys.only("rope.scaling.attn_factor", 1.0)
    if any(name.startswith("rope_") for name in tensors):
        raise UnsupportedModel("granitehybrid with divisors of RoPE's frequencies is not supported")
    return spec.make_rope(
        n_rot=keys.whole("rope.dimension_count", head_dim, most=spec.MAX_HEAD_DIM),
        base=keys.number("rope.freq_base", 10000.0),
        layout="norm",
    )


def _ssm(keys: Header, arch: str, layers: tuple[int, ...], tensors: Mapping[str, Any]) -> SsmSpec:
    """The recurrent layers; what llama.cpp calls their rank is the number of Mamba-2's heads."""
    keys.only("ssm.dt_b_c_rms", False)
    rank = keys.whole("ssm.time_step_rank", most=_MAX_SIZE)
    mamba1 = arch in ("mamba", "jamba")
    own: dict[str, Any] = (
        dict(kind="mamba1", dt_rank=rank, norms=arch == "jamba")
        if mamba1
        else dict(
            kind="mamba2",
            n_heads=rank,
            n_groups=keys.whole("ssm.group_count", most=_MAX_SIZE),
        )
    )
    return SsmSpec(
        layers=layers,
        d_inner=keys.whole("ssm.inner_size", most=_MAX_SIZE),
        d_state=keys.whole("ssm.state_size", most=_MAX_SIZE),
        d_conv=keys.whole("ssm.conv_kernel", least=2, most=_MAX_SIZE),
        conv_bias=f"blk.{layers[0]}.ssm_conv1d.bias" in tensors,
        **own,
    )

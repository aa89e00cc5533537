"""Recurrent layers of a decoder: their sizes, and their tensors in files.

Mamba-1, Mamba-2, the gated delta rule and gated retention, whose sizes have the same names.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from kvrt.config import RecurrentSpec
from kvrt.errors import BadModelFile
from kvrt_models.header import REMEDY

# GGUF names of a layer's tensors and what Hugging Face calls them.
_HF_NAMES = {
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_in.bias": "mamba.in_proj.bias",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_x.weight": "mamba.x_proj.weight",
    "ssm_dt_norm.weight": "mamba.dt_layernorm.weight",
    "ssm_b_norm.weight": "mamba.b_layernorm.weight",
    "ssm_c_norm.weight": "mamba.c_layernorm.weight",
    "ssm_dt.weight": "mamba.dt_proj.weight",
    "ssm_dt.bias": "mamba.dt_proj.bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out.weight": "mamba.out_proj.weight",
    "ssm_out.bias": "mamba.out_proj.bias",
}
# Mamba-2 has no projection to its step sizes, only a bias of them.
_MAMBA2_HF_NAMES = _HF_NAMES | {"ssm_dt.bias": "mamba.dt_bias"}
_DELTA_HF_NAMES = {
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_KDA_HF_NAMES = {
    "ssm_f_a.weight": "self_attn.f_a_proj.weight",
    "ssm_f_b.weight": "self_attn.f_b_proj.weight",
    "ssm_beta.weight": "self_attn.b_proj.weight",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_a": "self_attn.A_log",
    "ssm_g_a.weight": "self_attn.g_a_proj.weight",
    "ssm_g_b.weight": "self_attn.g_b_proj.weight",
    "ssm_norm.weight": "self_attn.o_norm.weight",
    "ssm_out.weight": "self_attn.o_proj.weight",
}
# Queries, keys and values have one each, which stand one below the other here.
_KDA_OF_THREE = {
    "ssm_in.weight": "self_attn.{}_proj.weight",
    "ssm_conv1d.weight": "self_attn.{}_conv1d.weight",
}
_RETENTION_HF_NAMES = {
    "ssm_gt.weight": "self_attn.gt_proj.weight",
    "ssm_out.weight": "self_attn.o_proj.weight",
}
# Queries, keys, values and gates likewise.
_RETENTION_OF_FOUR = "self_attn.{}_proj.weight"
_NAMES = {
    "mamba1": _HF_NAMES,
    "mamba2": _MAMBA2_HF_NAMES,
    "delta": _DELTA_HF_NAMES,
    "kda": _KDA_HF_NAMES,
    "retention": _RETENTION_HF_NAMES,
}
# What a step's tokens are multiplied with.
_MATRICES = ("ssm_in.weight", "ssm_x.weight", "ssm_dt.weight", "ssm_out.weight")
_MATRICES += ("ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SsmSpec:
    """Recurrent layers of a decoder, all alike.

    Attributes:
      kind: "mamba1" has a decay for every channel and state, "mamba2" one for every head; "delta"
        is the gated delta rule, with one for every head; "kda" with one for every channel of a key;
        "retention" is gated retention, with one for every head.
      layers: indices of the layers, ascending.
      d_inner: channels; of the gated delta rule those of its values.
      d_state: numbers that a channel remembers: of the gated delta rule channels of a key.
      d_conv: tokens that the convolution sees, its own included; at least 2, and 0 without one.
      dt_rank: width through which Mamba-1 makes its step sizes; unused by Mamba-2.
      n_heads: heads of Mamba-2, channels of one step size, or of the gated delta rule's values;
        unused by Mamba-1.
      n_groups: groups of Mamba-2's heads that share B and C, and of channels normed together; of
        the gated delta rule's heads that share a query and a key.
      norms: step sizes, B and C are normed (Jamba); Mamba-1 only.
      conv_bias: the convolution has a bias.
      proj_bias: the projections in and out have biases.
      rope_base: of the rotation of queries and keys of gated retention.
    """

    kind: Literal["mamba1", "mamba2", "delta", "kda", "retention"]
    layers: tuple[int, ...]
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int = 0
    n_heads: int = 0
    n_groups: int = 1
    norms: bool = False
    conv_bias: bool = True
    proj_bias: bool = False
    rope_base: float = 1e4

    def __post_init__(self) -> None:
        """Refuses heads that do not share the channels, or the groups, evenly."""
        if self.kind == "mamba1":
            return
        called = {"mamba2": "Mamba-2", "retention": "gated retention"}.get(
            self.kind, "the gated delta rule"
        )
        for whole, name, part in (
            (self.d_inner, "channels", self.n_heads),
            (self.n_heads, "heads", self.n_groups),
        ):
            if whole % part:
                raise BadModelFile(
                    f"the model's header names {whole} {name} of {called} to be shared by "
                    f"{part}; they must be a multiple of it; {REMEDY}"
                )

    @property
    def is_delta(self) -> bool:
        """Whether the layers have a gated delta rule."""
        return self.kind in ("delta", "kda")

    @property
    def n_conv(self) -> int:
        """Channels of the convolution: of B and C, or of queries and keys, as well."""
        shared = 2 * self.n_groups * self.d_state if self.kind != "mamba1" else 0
        return self.d_inner + shared

    @property
    def recurrent(self) -> RecurrentSpec:
        """What the cache keeps: the convolution's last inputs, and the state."""
        state = (self.d_inner, self.d_state)
        if self.is_delta or self.kind == "retention":
            state = (self.n_heads, self.d_state, self.d_inner // self.n_heads)
        if self.kind == "mamba2":
            state = (self.n_heads, self.d_inner // self.n_heads, self.d_state)
        # Gated retention has no convolution, and counts tokens.
        first = (self.d_conv - 1, self.n_conv) if self.d_conv else (1,)
        return RecurrentSpec(layers=self.layers, shapes=(first, state))


def ssm_tensor_names(of: SsmSpec) -> list[str]:
    """GGUF names of the tensors of all recurrent layers, without the norm before each."""
    if of.kind == "kda":
        return [f"blk.{i}.{kind}" for i in of.layers for kind in (*_KDA_OF_THREE, *_KDA_HF_NAMES)]
    if of.kind == "retention":
        kinds = ("ssm_in.weight", *_RETENTION_HF_NAMES)
        return [f"blk.{i}.{kind}" for i in of.layers for kind in kinds]
    kinds = ["ssm_in.weight", "ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_d"]
    kinds += ["ssm_out.weight"]
    kinds += ["ssm_x.weight", "ssm_dt.weight"] if of.kind == "mamba1" else ["ssm_norm.weight"]
    if of.kind == "delta":
        kinds = [*(kind for kind in kinds if kind != "ssm_d"), "ssm_ba.weight"]
    kinds += [f"ssm_{x}_norm.weight" for x in ("dt", "b", "c")] if of.norms else []
    kinds += ["ssm_conv1d.bias"] if of.conv_bias else []
    kinds += ["ssm_in.bias", "ssm_out.bias"] if of.proj_bias else []
    return [f"blk.{i}.{kind}" for i in of.layers for kind in kinds]


def ssm_tensor_shape(of: SsmSpec, name: str, n_embd: int) -> tuple[int, ...]:
    """The shape that a tensor of this GGUF name must have."""
    kind = _kind(name)
    if of.kind == "kda":
        return _kda_shapes(of, n_embd)[kind]
    if of.kind == "retention":
        n_in = 2 * (of.n_heads * of.d_state + of.d_inner)
        return {
            "ssm_in.weight": (n_in, n_embd),
            "ssm_gt.weight": (of.n_heads, n_embd),
            "ssm_out.weight": (n_embd, of.d_inner),
        }[kind]
    mamba1 = of.kind == "mamba1"
    n_dt = of.d_inner if mamba1 else of.n_heads
    n_in = 2 * of.d_inner if mamba1 else of.d_inner + of.n_conv
    n_in += of.n_heads if of.kind == "mamba2" else 0
    delta_norm = (of.d_inner // max(of.n_heads, 1),)
    return {
        "ssm_in.weight": (n_in, n_embd),
        "ssm_in.bias": (n_in,),
        "ssm_ba.weight": (2 * of.n_heads, n_embd),
        "ssm_conv1d.weight": (of.n_conv, of.d_conv),
        "ssm_conv1d.bias": (of.n_conv,),
        "ssm_x.weight": (of.dt_rank + 2 * of.d_state, of.d_inner),
        "ssm_dt_norm.weight": (of.dt_rank,),
        "ssm_b_norm.weight": (of.d_state,),
        "ssm_c_norm.weight": (of.d_state,),
        "ssm_dt.weight": (of.d_inner, of.dt_rank),
        "ssm_dt.bias": (n_dt,),
        "ssm_a": (of.d_inner, of.d_state) if mamba1 else (of.n_heads, 1),
        "ssm_d": (of.d_inner,) if mamba1 else (of.n_heads, 1),
        "ssm_norm.weight": delta_norm
        if of.kind == "delta"
        else (of.n_groups, of.d_inner // of.n_groups),
        "ssm_out.weight": (n_embd, of.d_inner),
        "ssm_out.bias": (n_embd,),
    }[kind]


def _kda_shapes(of: SsmSpec, n_embd: int) -> dict[str, tuple[int, ...]]:
    """As `ssm_tensor_shape`; decays and gates come through as few channels as a head has."""
    width, n_low = of.d_inner, of.d_inner // of.n_heads
    return {
        "ssm_in.weight": (of.n_conv, n_embd),
        "ssm_conv1d.weight": (of.n_conv, of.d_conv),
        "ssm_f_a.weight": (n_low, n_embd),
        "ssm_f_b.weight": (width, n_low),
        "ssm_beta.weight": (of.n_heads, n_embd),
        "ssm_dt.bias": (width,),
        "ssm_a": (of.n_heads, 1),
        "ssm_g_a.weight": (n_low, n_embd),
        "ssm_g_b.weight": (width, n_low),
        "ssm_norm.weight": (n_low,),
        "ssm_out.weight": (n_embd, width),
    }


def ssm_hf_names(of: SsmSpec, name: str) -> list[str]:
    """What Hugging Face calls a tensor of a layer, or its parts, after the layer's own name."""
    kind = _kind(name)
    if of.kind == "kda" and kind in _KDA_OF_THREE:
        return [_KDA_OF_THREE[kind].format(x) for x in "qkv"]
    if of.kind == "retention" and kind == "ssm_in.weight":
        return [_RETENTION_OF_FOUR.format(x) for x in "qkvg"]
    return [_NAMES[of.kind][kind]]


def is_small(name: str) -> bool:
    """Whether the tensor is one of a recurrent layer's that no product of matrices needs."""
    return is_recurrent(name) and _kind(name) not in _MATRICES


def is_recurrent(name: str) -> bool:
    """Whether the tensor of this GGUF name belongs to a recurrent layer's own part."""
    return ".ssm_" in name


def ssm_from_hf(
    of: SsmSpec, found: Sequence[np.ndarray], name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """A tensor of Hugging Face as GGUF has it: A itself, not its logarithm, and axes of length 1.

    Of the gated delta rule's projections, whose parts stand side by side for each key, all queries
    come first, then all keys, values and gates.

    Raises:
      BadModelFile: it has another number of values.
    """
    # Parts of one size each: queries, keys and values have as many channels.
    sizes = {x.size * len(found) for x in found}
    if sizes != {np.prod(shape, dtype=object)}:
        raise BadModelFile(f"tensor {name!r} has shape {found[0].shape}, {shape} wanted")
    rows = (shape[0] // len(found), *shape[1:])
    x = np.concatenate([x.reshape(rows) for x in found]) if found[1:] else found[0].reshape(shape)
    heads = of.d_inner // of.n_groups
    parts = {
        "ssm_in.weight": (of.d_state, of.d_state, heads, heads),
        "ssm_ba.weight": (of.n_heads // of.n_groups,) * 2,
    }
    if of.kind == "delta" and _kind(name) in parts:
        by_key = x.reshape(of.n_groups, -1, x.shape[1])
        split = np.split(by_key, np.cumsum(parts[_kind(name)])[:-1], axis=1)
        return np.concatenate([part.reshape(-1, x.shape[1]) for part in split])
    return -np.exp(x) if name.endswith("ssm_a") else x


def _kind(name: str) -> str:
    return name.split(".", 2)[2]

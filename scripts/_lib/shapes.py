"""Shapes of known models with random weights: what benchmarks run where no file is at hand."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.config import GroupSpec, MaskSpec, RopeSpec
from kvrt_models import spec
from kvrt_models.decoder import Decoder
from kvrt_models.layers import int8
from kvrt_models.layers.linear import Matrix
from kvrt_models.layers.tensors import is_matrix, is_norm, weight_parts, weight_shape
from kvrt_models.load import load
from kvrt_models.spec import DecoderSpec, Layers
from kvrt_models.weights.shapes import n_bytes, weight_shapes
from kvrt_models.weights.types import WeightType


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Llama:
    """Sizes of a llama decoder; `heads` are query heads, kv heads and channels of one."""

    n_layers: int
    n_vocab: int
    n_embd: int
    n_ff: int
    heads: tuple[int, int, int]
    rope: RopeSpec
    n_ctx_train: int
    tied: bool

    def spec(self) -> DecoderSpec:
        """The decoder."""
        return spec.build(
            arch="llama",
            layers=[Layers(layers=tuple(range(self.n_layers)), rope=self.rope)],
            n_vocab=self.n_vocab,
            n_embd=self.n_embd,
            n_ff=self.n_ff,
            n_heads=self.heads[0],
            n_kv_heads=self.heads[1],
            head_dim=self.heads[2],
            norm_eps=1e-5,
            n_ctx_train=self.n_ctx_train,
            tied=self.tied,
            qkv_bias=False,
            out_bias=False,
            ffn_bias=False,
            qk_norm=False,
        )


def _llama3_rope(n_rot: int, factor: float) -> RopeSpec:
    return RopeSpec(n_rot=n_rot, base=5e5, scaling="llama3", factor=factor, n_ctx_orig=8192)


def _gemma3_27b() -> DecoderSpec:
    layers = range(62)
    near = Layers(
        layers=tuple(i for i in layers if i % 6 != 5), rope=RopeSpec(n_rot=128), window=1024
    )
    far = Layers(
        layers=tuple(i for i in layers if i % 6 == 5),
        rope=RopeSpec(n_rot=128, base=1e6, scaling="linear", factor=8.0),
    )
    return spec.build(
        arch="gemma3",
        layers=[near, far],
        n_vocab=262_208,
        n_embd=5376,
        n_ff=21_504,
        n_heads=32,
        n_kv_heads=16,
        head_dim=128,
        scale=168**-0.5,
        norm_eps=1e-6,
        n_ctx_train=131_072,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        qk_norm=True,
        **spec.gemma(5376, None),
    )


# By name, as the models' config.json has them.
SHAPES: dict[str, DecoderSpec] = {
    "smollm2-135m": _Llama(
        n_layers=30,
        n_vocab=49_152,
        n_embd=576,
        n_ff=1536,
        heads=(9, 3, 64),
        rope=RopeSpec(n_rot=64, base=1e5),
        n_ctx_train=8192,
        tied=True,
    ).spec(),
    "llama-3.2-1b": _Llama(
        n_layers=16,
        n_vocab=128_256,
        n_embd=2048,
        n_ff=8192,
        heads=(32, 8, 64),
        rope=_llama3_rope(64, 32.0),
        n_ctx_train=131_072,
        tied=True,
    ).spec(),
    "llama-3.1-8b": _Llama(
        n_layers=32,
        n_vocab=128_256,
        n_embd=4096,
        n_ff=14_336,
        heads=(32, 8, 128),
        rope=_llama3_rope(128, 8.0),
        n_ctx_train=131_072,
        tied=False,
    ).spec(),
    "gemma-3-27b": _gemma3_27b(),
    # For tests and first tries: every part of the others, in no time.
    "toy": dataclasses.replace(
        _Llama(
            n_layers=2,
            n_vocab=256,
            n_embd=64,
            n_ff=128,
            heads=(4, 2, 32),
            rope=RopeSpec(n_rot=32),
            n_ctx_train=131_072,
            tied=False,
        ).spec(),
        groups=(
            GroupSpec(
                layers=(0,),
                n_kv_heads=2,
                head_dim=32,
                rope=RopeSpec(n_rot=32),
                mask=MaskSpec(kind="window", size=64),
            ),
            GroupSpec(layers=(1,), n_kv_heads=2, head_dim=32, rope=RopeSpec(n_rot=32)),
        ),
    ),
}


def shape(name: str, n_layers: int | None = None) -> DecoderSpec:
    """A shape, or its first n_layers layers: figures of a slice are not those of the model.

    Raises:
      ValueError: it has fewer layers.
    """
    whole = SHAPES[name]
    if n_layers is None or n_layers == whole.n_layers:
        return whole
    if not 0 < n_layers < whole.n_layers:
        raise ValueError(f"{n_layers} layers asked, {name} has {whole.n_layers}; take 1 to that")
    groups = []
    for group in whole.groups:
        kept = tuple(i for i in group.layers if i < n_layers)
        groups += [dataclasses.replace(group, layers=kept)] if kept else []
    return dataclasses.replace(whole, groups=tuple(groups))


def weight_bytes(of: DecoderSpec, dtype: WeightType) -> tuple[int, int]:
    """Bytes of all weights, and of those that a step reads: of an embedding only some rows are."""
    weights = weight_shapes(of, dtype)
    total, table = n_bytes(weights), n_bytes({"": weights["token_embd.weight"]})
    return total, total - (0 if of.tied else table)


def matrix_sizes(of: DecoderSpec) -> int:
    """Numbers in the matrices that each token of a prompt is multiplied with."""
    tables = ("token_embd.weight", "output.weight")
    shapes = {n: weight_shape(of, parts) for n, parts in weight_parts(of).items()}
    return sum(math.prod(x) for n, x in shapes.items() if len(x) > 1 and n not in tables)


def decoder(name: str) -> Decoder:
    """A known model, fetched where it is not there; "toy" is the shape of that name."""
    return (
        random_decoder(SHAPES["toy"], "f32") if name == "toy" else load(name, dtype="f32").decoder
    )


def random_decoder(of: DecoderSpec, dtype: WeightType) -> Decoder:
    """A decoder of random weights, drawn on the device; eight bits are quantized on the host."""
    drawn = "f32" if dtype == "int8" else dtype
    keys = jax.random.split(jax.random.key(0), len(weight_parts(of)))
    weights: dict[str, Matrix] = {}
    for key, (name, x) in zip(keys, weight_shapes(of, drawn).items(), strict=True):
        assert isinstance(x, jax.ShapeDtypeStruct)
        weight = jnp.ones(x.shape, x.dtype) if is_norm(name) else _draw(key, x.shape, x.dtype)
        if dtype == "int8" and is_matrix(name, x.shape):
            weights[name] = jax.device_put(int8.for_device(int8.quantize(np.asarray(weight))))
        else:
            weights[name] = weight
    return Decoder(of, weights)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, size: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    # Small, so that a stream of many layers stays finite.
    width = 1.0 / math.sqrt(size[-1])
    return jax.random.uniform(key, size, dtype, -width, width)

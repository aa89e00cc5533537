"""What of a model and its cache a kernel has to get right: one case for each kind of layer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kvrt.arrays import Array
from kvrt.attention.contract import ChunkedStep, Decoder, Inputs, Outputs, Step
from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt.options.cache import CacheConfig, ExtendKind, RopeMode, SelfExtend
from kvrt.sizes import StoreSpec
from kvrt.store.shards import Shards

# Tokens of the prompt that a self-test reads: more than kernels take in one product with each other
# (`pallas.attend.OWN`).
_PROMPT = 144
_WORD_BITS = 32


class Query(NamedTuple):
    """What a layer asks attention for: query heads, their dtype, and sinks."""

    n_heads: int
    dtype: str
    sinks: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Layers that run the same program of attention, but for sizes that it takes at run time.

    Attributes:
      group: mask, RoPE, scale and soft cap; its kv heads are those of one device.
      n_q_heads: query heads of one device.
      dtype: of queries, and of the step's own keys and values.
      sinks: each query head has a logit of its own.
      type_k: KV dtype of keys.
      type_v: KV dtype of values.
      block_size: cells of a block.
      n_words: words of a cell's owners.
      n_prompt: tokens of a prompt's step.
      rope: whether cached keys are rotated.
      hadamard: whether quantized keys and values are transformed.
      self_extend: grouped positions, or None.
      divided: devices divide the cells.
    """

    group: GroupSpec
    n_q_heads: int
    dtype: str
    sinks: bool
    type_k: KeyDtype
    type_v: KVDtype
    block_size: int
    n_words: int
    n_prompt: int
    rope: RopeMode
    hadamard: bool
    self_extend: SelfExtend | None
    divided: bool

    def __str__(self) -> str:
        """For the middle of a line."""
        kinds = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        return f"head size {self.group.head_dim}, {kinds}"


def cases_of(
    model: Decoder,
    config: CacheConfig,
    layers: Sequence[tuple[GroupSpec, StoreSpec]],
    shards: Shards | None = None,
) -> list[Case]:
    """The cases of a model on a cache, each once; the model is traced, nothing is computed.

    Args:
      model: a `kvrt.attention.Decoder`; shapes in place of its weights will do.
      config: of the cache.
      layers: each group of attention layers with the arrays that hold its keys and values.
      shards: the devices that divide the cache, None for one.
    """
    asked = _queries(model) if layers else {}
    found = (
        case_of(config, group, store, query, shards)
        for group, store in layers
        for query in sorted({asked[i] for i in group.all_layers if i in asked})
    )
    return list(dict.fromkeys(found))


def case_of(
    config: CacheConfig,
    group: GroupSpec,
    store: StoreSpec,
    query: Query,
    shards: Shards | None = None,
) -> Case:
    """The case of layers that ask alike; arguments as `cases_of`."""
    n_q, n_kv = _of_device(query.n_heads, group.n_kv_heads, shards)
    kind: ExtendKind | None = config.self_extend and config.self_extend.kind
    return Case(
        group=dataclasses.replace(group, layers=(0,), kv_of=(), n_kv_heads=n_kv, indexed=None),
        n_q_heads=n_q,
        dtype=query.dtype,
        sinks=query.sinks,
        type_k=store.type_k,
        type_v=store.type_v,
        block_size=store.extent.block_size,
        n_words=-(-config.n_seq_max // _WORD_BITS),
        n_prompt=min(config.n_ubatch, _PROMPT),
        rope=config.rope,
        hadamard=config.hadamard,
        # The cache's kind moves positions of cells and leaves attention as it is.
        self_extend=config.self_extend if kind == "paper" else None,
        divided=shards is not None,
    )


def _of_device(n_q: int, n_kv: int, shards: Shards | None) -> tuple[int, int]:
    """Query heads and kv heads of one device, as `TokenQKV.specs` divides them."""
    if shards is None:
        return n_q, n_kv
    n = shards.n_heads
    if shards.head_axis(n_kv) is not None:
        return n_q // n, n_kv // n
    return (n_q // n if n_kv == 1 and n_q % n == 0 else n_q), n_kv


def query_heads(model: Decoder) -> dict[int, int]:
    """Query heads of each attention layer of a model, which is traced."""
    return {layer: query.n_heads for layer, query in _queries(model).items()}


def _queries(model: Decoder) -> dict[int, Query]:
    """What each layer of a model asks attention for."""
    graph, params = nnx.split(model)
    recurrent: RecurrentSpec | None
    recurrent = model.recurrent  # pyright: ignore[reportAttributeAccessIssue]
    groups: Sequence[GroupSpec]
    groups = model.groups  # pyright: ignore[reportAttributeAccessIssue]
    listener = _Listener(recurrent, {i: g.latent_rank for g in groups for i in g.all_layers})

    def run(params: Any, tokens: Array, out_ids: Array) -> Any:
        return nnx.merge(graph, params)(tokens, listener, out_ids)

    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    jax.eval_shape(run, params, one, one)
    return listener.asked


class _Listener:
    """An `Attend` without a cache, which notes what each layer asks for."""

    def __init__(self, recurrent: RecurrentSpec | None, ranks: Mapping[int, int]):
        """Nothing was asked yet."""
        self.asked: dict[int, Query] = {}
        self._arrays = (
            dict(zip(recurrent.layers, recurrent.arrays, strict=True)) if recurrent else {}
        )
        self._ranks = ranks

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        *,
        sinks: Array | None = None,
    ) -> Array:
        """Something of the output's shape."""
        self.asked[layer] = Query(q.shape[1], q.dtype.name, sinks is not None)
        return jnp.zeros_like(q[:, :, : self._ranks.get(layer) or None])

    def produce(self, layer: int, k: Array, v: Array | None) -> None:
        """It asks for nothing: it has no queries."""

    def index(self, layer: int, q: Array, k: Array, weights: Array) -> None:
        """It asks for nothing: a kernel has no part in it."""

    def for_tokens(self, ids: Array) -> "_Listener":
        """Whose queries they are makes no difference."""
        return self

    def recur(
        self,
        layer: int,
        step: Step[Outputs],
        inputs: Inputs,
        *,
        chunk: ChunkedStep[Outputs] | None = None,
    ) -> Outputs:
        """Something of the outputs' shapes."""
        state = tuple(jnp.zeros(x.shape, x.dtype) for x in self._arrays[layer])
        _, out = jax.eval_shape(step, state, jax.tree.map(lambda x: x[0], inputs))
        n = inputs[0].shape[0]
        return jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), out)

"""Steps of some layers over tokens that are cached already, whose keys and values they replace.

Layers up to a check layer run over all tokens, the others over those that were chosen by what was
found there. A token sees what is cached at lower positions and never its own old entry.

Source: arXiv:2405.16444 (CacheBlend), sec. 4.2.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import AnyArray, Array, Float, Int32
from kvrt.attention.contract import LayeredDecoder
from kvrt.attention.step_attention import StepAttention
from kvrt.cells import Cells
from kvrt.program.batch import Batch
from kvrt.program.device import Device
from kvrt.program.layers.by_layer import Arrays, StepByLayer, take_rows
from kvrt.program.programs import ModelKind, Program
from kvrt.program.step import Cache, StepSpec, emptied, in_place, place_step
from kvrt.store import kv as kv_store
from kvrt.store.kv import KVStore

# The residual stream of tokens, and how far keys and values of each are from the cached ones.
Checked = tuple[Float[Array, "N E"], Float[Array, "2 T"]]


class LayerRange:
    """The first layers of a device's model, and those behind them, over tokens that it caches."""

    def __init__(self, device: Device, n_layers: int):
        """Splits the model behind n_layers; compiles nothing yet.

        Raises:
          BadConfig: the model cannot be run in parts.
        """
        self._device, self._n_layers = device, n_layers
        programs = device.programs
        token = jax.ShapeDtypeStruct((1,), np.int32)
        embed = jax.eval_shape(
            lambda params, t: programs.kind.in_parts(params).embed(t), programs.params, token
        )
        self._stream = jnp.zeros((device.spec.config.n_ctx, embed.shape[1]), jnp.float32)

    def check(self, batch: Batch, at: np.ndarray) -> Float[Array, "2 T"]:
        """Runs the first layers, see `check_layers`; `at` is n_ctx for padding."""
        if self._device.by_layer is None:
            (self._stream, apart) = self._run(check_layers, batch, at, donate=(1, 3))
        else:
            self._stream, apart = self._in_order(check_by_layer, batch, at)
        return apart

    def finish(self, batch: Batch, at: np.ndarray) -> Float[Array, "R V"]:
        """Runs the layers behind them; see `finish_layers`."""
        if self._device.by_layer is None:
            return self._run(finish_layers, batch, at, donate=(1,))
        return self._device.logits(self._in_order(finish_by_layer, batch, at))[0]

    def _run(self, part: Callable, batch: Batch, at: np.ndarray, donate: tuple[int, ...]) -> Any:
        device = self._device
        static = device.programs.kind, part, self._n_layers
        args = device.programs.params, device.cache, batch, self._stream, at
        if device.labels:
            device.labels.mark_all()
        wanted = Program(run_part, static, args, donate, n_known=2)
        result, device.cache = device.programs.run(wanted)
        return result

    def _in_order(self, part: Callable, batch: Batch, at: np.ndarray) -> Any:
        device = self._device
        if device.labels:
            device.labels.mark_all()
        args = batch, self._stream, at
        walk = functools.partial(part, device.by_layer, self._n_layers)
        return device.in_order((part, self._n_layers), args, walk)


def run_part(
    kind: ModelKind, part: Callable, n_layers: int, params: tuple, cache: Cache, *args: Any
) -> tuple[Any, Cache]:
    """`check_layers` or `finish_layers` as a program."""
    return part(kind.in_parts(params), cache, *args, (n_layers, kind.spec))


def check_layers(
    model: LayeredDecoder,
    cache: Cache,
    batch: Batch,
    stream: Float[Array, "N E"],
    at: Int32[AnyArray, " T"],
    how: tuple[int, StepSpec],
) -> tuple[Checked, Cache]:
    """Runs the first layers over tokens, and compares what the last of them would cache.

    Args:
      model: whose layers.
      cache: donated by jitted callers.
      batch: tokens with their slots; what those hold is replaced in the layers that run.
      stream: gets the residual stream behind the layers; donated by jitted callers.
      at: rows of it, one a token; N is padding. `[T]`
      how: how many layers run, at least one, and the spec of the cache.

    Returns:
      The stream with these tokens; squared distances of their keys, then of their values, from
      what was cached in the last of the layers, summed over heads and channels; and the cache.
    """
    n_layers, spec = how

    def run(tokens: Array, attention: StepAttention) -> tuple[Array, Array]:
        x = model.layers(model.embed(tokens), attention, 0, n_layers)
        return x.astype(jnp.float32), distances(attention, n_layers - 1, batch, spec)

    (x, apart), cache = in_place(run, cache, batch, spec)
    return (stream.at[at].set(x, mode="drop"), apart), cache


def finish_layers(
    model: LayeredDecoder,
    cache: Cache,
    batch: Batch,
    stream: Float[Array, "N E"],
    at: Int32[AnyArray, " T"],
    how: tuple[int, StepSpec],
) -> tuple[Float[Array, "R V"], Cache]:
    """Runs the layers from some one on over tokens of a stream; logits of batch.out_ids.

    Args:
      model: whose layers.
      cache: donated by jitted callers.
      batch: tokens with their slots; what those hold is replaced in the layers that run.
      stream: what `check_layers` left.
      at: the tokens' rows of it. `[T]`
      how: the first layer that runs, and the spec of the cache.
    """
    first, spec = how
    n_layers = spec.layout.n_layers

    def run(_: Array, attention: StepAttention) -> Array:
        x = model.layers(stream.at[at].get(mode="clip"), attention, first, n_layers)
        return model.head(x[batch.out_ids])

    return in_place(run, cache, batch, spec)


def distances(
    attention: StepAttention, layer: int, batch: Batch, spec: StepSpec
) -> Float[Array, "2 T"]:
    """Squared distances of a layer's new keys and values from those in the slots of its tokens."""
    groups = zip(spec.layout.groups, batch.places, strict=True)
    slots = next(jnp.asarray(places.slots) for group, places in groups if layer in group.layers)
    kv = attention.layers[layer].kv
    old = kv_store.read_kv(KVStore(k=(kv.k,), v=(kv.v,)), 0, slots)
    pairs = zip((attention.k_new[layer], attention.v_new[layer]), old, strict=True)
    return jnp.stack([jnp.sum((a.astype(jnp.float32) - b) ** 2, axis=(1, 2)) for a, b in pairs])


# --- by layer ----------------------------------------------------------------------------------


def check_by_layer(
    layers: StepByLayer, n_layers: int, arrays: Arrays, args: tuple[Batch, Any, np.ndarray]
) -> tuple[Any, Any]:
    """`check_layers` as several programs; the stream and distances, or their shapes."""
    (batch, stream, at), runs = args, layers.split(n_layers)[0]
    x, batch = layers.embed(arrays, _in_slots(layers, arrays, batch))
    passed = layers.run(arrays, batch, x, runs, look=distances)
    given = arrays.cells, stream, batch, at, passed.stream.x
    wanted = Program(put_stream, (layers.kind,), given, donate=(0, 1), n_known=1)
    stream, arrays.cells = arrays.call(wanted)
    return stream, passed.stream.seen[n_layers - 1]


def finish_by_layer(
    layers: StepByLayer, n_layers: int, arrays: Arrays, args: tuple[Batch, Any, np.ndarray]
) -> Any:
    """`finish_layers` as several programs, but for the head; the stream, or its shape."""
    batch, stream, at = args
    batch = _in_slots(layers, arrays, batch)
    x = arrays.call(Program(take_rows, (), (stream, at)))
    passed = layers.run(arrays, batch, x, layers.split(n_layers)[1])
    return layers.finish(arrays, batch, passed)


def _in_slots(layers: StepByLayer, arrays: Arrays, batch: Batch) -> Batch:
    """The batch, whose tokens do not see what their slots have."""
    args = arrays.cells, batch
    batch, arrays.cells = arrays.call(Program(vacate_slots, (layers.kind,), args, (0,), n_known=1))
    return batch


def vacate_slots(
    kind: ModelKind, cells: tuple[Cells, ...], batch: Batch
) -> tuple[Batch, tuple[Cells, ...]]:
    """A batch, and cells without what is in its slots."""
    return batch, emptied(cells, batch, kind.spec)


def put_stream(
    kind: ModelKind,
    cells: tuple[Cells, ...],
    stream: Float[Array, "N E"],
    batch: Batch,
    at: Int32[AnyArray, " T"],
    x: Float[Array, "T E"],
) -> tuple[Float[Array, "N E"], tuple[Cells, ...]]:
    """The stream and the cells with the tokens of a step; both are donated."""
    stream = stream.at[at].set(x.astype(jnp.float32), mode="drop")
    return stream, place_step(cells, batch, kind.spec)

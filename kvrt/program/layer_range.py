"""Steps of some layers over tokens that are cached already, whose keys and values they replace.

Layers up to a check layer run over all tokens, the others over those that were chosen by what was
found there. A token sees what is cached at lower positions and never its own old entry.

Source: arXiv:2405.16444 (CacheBlend), sec. 4.2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import AnyArray, Array, Float, Int32
from kvrt.attention.contract import LayeredDecoder
from kvrt.attention.step_attention import StepAttention
from kvrt.attention.types import LayerStep
from kvrt.cells import vacate
from kvrt.errors import BadConfig
from kvrt.program.batch import Batch
from kvrt.program.device import Device
from kvrt.program.programs import ModelKind, Program
from kvrt.program.step import Cache, Result, StepSpec, step
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

        def embed(params: tuple, tokens: Array) -> Array:
            return in_parts(programs.kind.model(params)).embed(tokens)

        width = jax.eval_shape(embed, programs.params, token).shape[1]
        self._stream = jnp.zeros((device.spec.config.n_ctx, width), jnp.float32)

    def check(self, batch: Batch, at: np.ndarray) -> Float[Array, "2 T"]:
        """Runs the first layers, see `check_layers`; `at` is n_ctx for padding."""
        (self._stream, apart) = self._run(check_layers, batch, at, donate=(1, 3))
        return apart

    def finish(self, batch: Batch, at: np.ndarray) -> Float[Array, "R V"]:
        """Runs the layers behind them; see `finish_layers`."""
        return self._run(finish_layers, batch, at, donate=(1,))

    def _run(self, part: Callable, batch: Batch, at: np.ndarray, donate: tuple[int, ...]) -> Any:
        device = self._device
        static = device.programs.kind, part, self._n_layers
        args = device.programs.params, device.cache, batch, self._stream, at
        if device.labels:
            device.labels.mark_all()
        wanted = Program(run_part, static, args, donate, n_known=2)
        result, device.cache = device.programs.run(wanted)
        return result


def run_part(
    kind: ModelKind, part: Callable, n_layers: int, params: tuple, cache: Cache, *args: Any
) -> tuple[Any, Cache]:
    """`check_layers` or `finish_layers` as a program."""
    return part(in_parts(kind.model(params)), cache, *args, (n_layers, kind.spec))


def in_parts(model: Any) -> LayeredDecoder:
    """The model, if it can be run in parts.

    Raises:
      BadConfig: it cannot.
    """
    if not isinstance(model, LayeredDecoder):
        raise BadConfig(
            f"{type(model).__name__} cannot be run in parts; give it embed, layers and head, see "
            "kvrt.LayeredDecoder"
        )
    return model


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
        last = n_layers - 1
        slots = _slots_of(batch, spec, last)
        old = _cached(attention.layers[last], slots)
        new = attention.k_new[last], attention.v_new[last]
        pairs = zip(new, old, strict=True)
        apart = [jnp.sum((a.astype(jnp.float32) - b) ** 2, axis=(1, 2)) for a, b in pairs]
        return x.astype(jnp.float32), jnp.stack(apart)

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


def in_place(
    run: Callable[[Array, StepAttention], Result], cache: Cache, batch: Batch, spec: StepSpec
) -> tuple[Result, Cache]:
    """A step of tokens whose old entries are in its slots, and are seen by none."""
    cells = list(cache.cells)
    for i, places in zip(spec.layout.store_of, batch.places, strict=True):
        cells[i] = vacate(cells[i], jnp.asarray(places.slots), 1)
    return step(run, dataclasses.replace(cache, cells=tuple(cells)), batch, spec)


def _slots_of(batch: Batch, spec: StepSpec, layer: int) -> Int32[Array, " T"]:
    groups = zip(spec.layout.groups, batch.places, strict=True)
    return next(jnp.asarray(places.slots) for group, places in groups if layer in group.layers)


def _cached(layer: LayerStep, slots: Int32[Array, " T"]) -> tuple[Array, Array]:
    return kv_store.read_kv(KVStore(k=(layer.kv.k,), v=(layer.kv.v,)), 0, slots)

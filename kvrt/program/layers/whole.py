"""A step as one program: that of `by_layer.py` under one jit, in which equal runs share a trace.

XLA inlines the calls, so what is compiled has every layer; what is traced and lowered has one run
of each kind.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.program import step
from kvrt.program.batch import Batch
from kvrt.program.layers.by_layer import Arrays, StepByLayer
from kvrt.program.programs import ModelKind, Program, TracedParams
from kvrt.program.step import Cache


def whole_step(
    kind: ModelKind, params: tuple, cache: Cache, batch: Batch
) -> tuple[Float[Array, "R V"], Cache]:
    """Runs a batch, as `step.forward`; a model without kinds of layers is traced layer by layer.

    Args:
      kind: of the model and the cache.
      params: all parameters.
      cache: donated by jitted callers.
      batch: tokens and their slots.

    Returns:
      Logits of batch.out_ids, and the cache with the tokens' keys, values and cells.
    """
    if kind.layers is None or len(kind.layers.kinds) != kind.spec.layout.n_layers:
        return step.forward(kind.model(params), cache, batch, kind.spec)
    traced, arrays = TracedParams(kind, params), Arrays(cache)
    rows = StepByLayer(traced).rows(call_traced, arrays, batch)
    model = kind.outer(traced.rest)
    if rows.shape[0] == 0:
        return jnp.zeros((0, model.n_vocab), jnp.float32), arrays.cache()
    return model.head(rows), arrays.cache()


def call_traced(program: Program) -> Any:
    """The results of a program within one that is traced; equal ones are traced once."""
    return _jitted(program.run, len(program.static))(*program.static, *program.args)


@functools.cache
def _jitted(run: Callable, n_static: int) -> jax.stages.Wrapped:
    return jax.jit(run, static_argnums=tuple(range(n_static)))

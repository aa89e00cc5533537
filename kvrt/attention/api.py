"""Attention over the cached keys and values of a layer and over the step's own tokens."""

import jax

from kvrt.arrays import Array, Float
from kvrt.attention import sharded
from kvrt.attention.registry import implementation
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView


# Jitted inside the step as well: layers of one group are traced once, which halves the start.
@jax.jit
def attend(
    qkv: TokenQKV, kv: LayerKV, view: AnyView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention of T tokens over cached keys and values and over themselves, one softmax.

    Args:
      qkv: the step's own tokens, RoPE applied.
      kv: cached keys and values of the layer, before the step's write.
      view: positions and owners of the tokens and cells, and the blocks to read.
      how: mask, scale, RoPE of cached keys, sinks, and the implementation: "chunked" (XLA, a
        runtime loop over blocks), "reference" (all cells at once), a kernel ("pallas_gpu",
        "pallas_tpu", "mosaic_gpu"), or a name given to `kvrt.attention.registry.register`.

    Returns:
      The output [T, Q, D] in q's dtype and the log-sum-exp [T, Q] in float32, so that results
      over disjoint cells can be merged.

    Raises:
      NoKernel: an implementation of that name does not exist, or cannot serve these keys and
        values.
    """
    of_name = implementation(how.implementation)
    if view.shards is not None:
        return sharded.attend(of_name, qkv, kv, view, how)
    return of_name(qkv, kv, view, how)

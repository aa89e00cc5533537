"""What attention takes beside a view (`view.py`), in three bundles; each knows its mesh layout.

`specs` of a bundle is the same bundle with a `PartitionSpec` in place of each array.
"""

import dataclasses
from typing import Any

from jax.sharding import PartitionSpec as P

from kvrt.arrays import Array, Float, state
from kvrt.attention.grouped import GroupedRope
from kvrt.attention.rope import RopeTables
from kvrt.config import GroupSpec
from kvrt.store.codec import KVArray
from kvrt.store.per_channel import KeyArray
from kvrt.store.shards import HEADS, Shards


@state
class TokenQKV:
    """The step's own tokens, RoPE applied; query head h reads kv head h // (Q / H).

    `grouped` has queries and keys at grouped positions as well, for SelfExtend as in the paper.
    """

    q: Float[Array, "T Q D"]
    k: Float[Array, "T H D"]
    v: Float[Array, "T H D"]
    grouped: tuple[Float[Array, "T Q D"], Float[Array, "T H D"]] | None = None

    def specs(self, shards: Shards) -> "TokenQKV":
        """Heads divided, tokens on every device."""
        n_q, n_kv = self.q.shape[1], self.k.shape[1]
        over = shards.head_axis(n_kv)
        # Query heads go with their kv heads; a single kv head lies on every device.
        alone = n_kv == 1 and n_q % shards.n_heads == 0
        q, kv = P(None, HEADS if alone else over), P(None, over)
        new: dict[str, Any] = {"q": q, "k": kv, "v": kv, "grouped": self.grouped and (q, kv)}
        return dataclasses.replace(self, **new)


@state
class LayerKV:
    """Cached keys and values of one layer, before the step's write.

    Plain keys are [N, H, D, B] and values [N, H, B, D]; quantized ones as `kvrt.store` has them.
    """

    k: KeyArray
    v: KVArray

    def specs(self, shards: Shards) -> "LayerKV":
        """Blocks and kv heads divided."""
        return shards.layers(self)


@state
class LayerAttention:
    """How a layer attends.

    Attributes:
      group: mask, scale and soft cap.
      rope: rotates cached keys that are stored unrotated; None where none needs it.
      grouped: rotates them to grouped positions (SelfExtend as in the paper); None compares all
        by their exact positions.
      sinks: a logit a query head that takes weight and gives no value, or None. `[Q]`
      implementation: one of `kvrt.attention.registry`.
    """

    group: GroupSpec = dataclasses.field(metadata=dict(static=True))
    rope: RopeTables | None = None
    grouped: GroupedRope | None = None
    sinks: Float[Array, " Q"] | None = None
    implementation: str = dataclasses.field(default="chunked", metadata=dict(static=True))

    def specs(self, heads: str | None) -> "LayerAttention":
        """Tables of cells divided as the cells are; sinks as the query heads, over axis `heads`."""
        new: dict[str, Any] = {"sinks": None if self.sinks is None else P(heads)}
        rope, grouped = self.rope and self.rope.specs(), self.grouped and self.grouped.specs()
        return dataclasses.replace(self, rope=rope, grouped=grouped, **new)

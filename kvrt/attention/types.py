"""What attention takes beside a view (`view.py`), in three bundles; each knows its mesh layout.

`specs` of a bundle is the same bundle with a `PartitionSpec` in place of each array. Behind them
what a step has of a layer, of which it makes them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvrt.arrays import AnyArray, Array, Float, state
from kvrt.attention.grouped import GroupedRope, GroupedTables
from kvrt.attention.rope import RopeTables
from kvrt.attention.select.choose import UnitView
from kvrt.attention.select.labels import LabelArray
from kvrt.attention.view import AnyView
from kvrt.config import GroupSpec, QueryTemperature
from kvrt.errors import BadConfig
from kvrt.store import hadamard
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
      rope: rotates cached keys as they are read; None where they are compared as stored.
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


MaybeArray = Array | None
AttendArgs = tuple[TokenQKV, LayerKV, AnyView, LayerAttention]


@dataclasses.dataclass(frozen=True)
class GroupView:
    """What some tokens of a step see in a group's layers; RoPE tables are made once for all.

    `units` are what they choose of, in a step of one token a sequence that reads sparsely.
    """

    view: AnyView
    rope: RopeTables | None
    grouped: GroupedTables | None
    units: UnitView | None = None

    def behind(self, rank: int) -> "GroupView":
        """The same for tokens whose keys begin with a latent, which RoPE leaves alone."""
        tables = self.rope and dataclasses.replace(self.rope, first=rank)
        return dataclasses.replace(
            self, rope=tables, grouped=self.grouped and self.grouped.behind(rank)
        )


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """Cached keys and values of one layer, and what it shares with its group.

    Attributes:
      group: its group.
      parts: what each part of the step's tokens sees, in the tokens' order.
      kv: cached keys and values.
      n_hadamard_k: channels of keys that are transformed together before they are quantized, 0
        for none.
      n_hadamard_v: the same of values.
      read: the layer whose keys and values these are; None is its own.
      labels: beside its keys, where decode reads sparsely.
    """

    group: GroupSpec
    parts: tuple[GroupView, ...]
    kv: LayerKV
    n_hadamard_k: int = 0
    n_hadamard_v: int = 0
    read: int | None = None
    labels: LabelArray | None = None

    def by_part(self, *tokens: Array) -> Iterator[tuple[GroupView, tuple[Array, ...]]]:
        """Arrays of the step's tokens by part; a step of one part, as most are, has them whole."""
        start = 0
        for part in self.parts:
            at = slice(start, start + part.view.n_tokens)
            yield part, tokens if len(self.parts) == 1 else tuple(x[at] for x in tokens)
            start = at.stop

    def compared(self, part: GroupView, x: Array) -> Array:
        """Queries or keys of a part's tokens as attention compares them."""
        rotated = x if part.rope is None else part.rope.rotate_tokens(x)
        return self.mixed_keys(rotated) if self.n_hadamard_k else rotated

    def mixed_keys(self, x: Array) -> Array:
        """Queries or keys whose channels are transformed; a latent before them stays."""
        rank = self.group.latent_rank
        keys = hadamard.transform(x[:, :, rank:], self.n_hadamard_k)
        return jnp.concatenate([x[:, :, :rank], keys], axis=2) if rank else keys

    def mixed_latent(self, q: Array) -> Array:
        """Queries as a latent is compared that is transformed, as values are."""
        latent, keys = jnp.split(q, [self.group.latent_rank], axis=2)
        return jnp.concatenate([hadamard.transform(latent, self.n_hadamard_v), keys], axis=2)

    def own_latent(self, layer: int, k: Array, v: MaybeArray) -> tuple[Array, Array]:
        """Keys and the latents that they begin with, as `mark_damage` leaves keys and values.

        A latent that is not finite is zero in both, and all that is behind it is NaN.

        Raises:
          BadConfig: the model gives values of its own.
        """
        rank = self.group.latent_rank
        if v is not None:
            raise BadConfig(
                f"layer {layer} keeps a latent of {rank} channels, which are its values too, and "
                "gives attend others; give None for v"
            )
        latent = hadamard.transform(k[:, :, :rank], self.n_hadamard_v)
        sound = jnp.isfinite(latent)
        latent = jnp.where(sound, latent, 0.0)
        keys = jnp.where(jnp.all(sound, axis=2, keepdims=True), k[:, :, rank:], jnp.nan)
        return jnp.concatenate([latent, keys], axis=2), latent


def mark_damage(k: Array, v: Any, n_hadamard: int) -> tuple[Array, Array]:
    """Keys and transformed values, NaN and zero in every channel whose value is not finite.

    0 * NaN is NaN, so a value would reach every query of a product with one that sees it, and
    other sequences. A NaN key reaches those alone that see it, for scores are masked.
    """
    v = hadamard.transform(v, n_hadamard) if n_hadamard else v
    # Channel by channel: whether a whole head is sound would be a reduction of its own.
    sound = jnp.isfinite(v)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0.0)


def tempered(q: Array, pos: AnyArray, at: QueryTemperature) -> Array:
    """Queries as long as their positions want them; a token of padding keeps its length."""
    pos = jnp.maximum(jnp.asarray(pos), 0).astype(jnp.float32)
    growth = jnp.log1p(jnp.floor((pos + 1.0) / at.floor_scale)) * at.attn_scale + 1.0
    return q * growth.astype(q.dtype)[:, None, None]

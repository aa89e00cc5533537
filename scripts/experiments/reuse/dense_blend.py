"""CacheBlend as a dense computation that knows no cache, and its masks by row as a control.

The code of the paper masks the chosen tokens by where their rows end, not by their positions: of m
rows among n tokens the i-th sees all but the last m - i - 1 tokens, later ones among them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvrt import GroupSpec
from kvrt.arrays import Array
from kvrt.store import rope

Mask = Literal["position", "row"]
Kept = dict[int, tuple[Array, ...]]  # unrotated keys, and values, by layer


class _Attend:
    """One pass over tokens at given positions, among cached entries or alone."""

    def __init__(
        self, groups: Sequence[GroupSpec], pos: np.ndarray, sees: np.ndarray, cached: Kept | None
    ):
        """`sees` is the last position that each token sees; `cached` has all positions."""
        self._group = {layer: group for group in groups for layer in group.layers}
        self._pos, self._sees, self._cached = pos, sees, cached
        self.kept: Kept = {}

    def __call__(self, layer: int, q: Array, k: Array, v: Array, *, sinks: None = None) -> Array:
        group, at = self._group[layer], self._pos
        if self._cached is not None:
            old_k, old_v = self._cached[layer]
            k, v = old_k.at[at].set(k), old_v.at[at].set(v)
            at = np.arange(len(k))
        self.kept[layer] = k, v
        q, k = _rotated(group, q, self._pos), _rotated(group, k, at)
        n_q, n_kv = q.shape[1], k.shape[1]
        q = q.reshape(len(q), n_kv, n_q // n_kv, -1)
        scale = group.scale or group.head_dim**-0.5
        scores = jnp.einsum("thgd,chd->hgtc", q, k) * scale
        seen = at[None, :] <= self._sees[:, None]
        p = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=3)
        return jnp.einsum("hgtc,chd->thgd", p, v).reshape(len(q), n_q, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseBlend:
    """Chunks that were computed alone, and a question behind them.

    Attributes:
      model: a `kvrt.LayeredDecoder` of full attention with RoPE, in float32.
      chunks: tokens of each, the lead first.
      n_lead: tokens of it, which only the first chunk keeps.
      question: tokens behind them.
      check_layer: where entries are compared.
    """

    model: Any
    chunks: Sequence[Sequence[int]]
    n_lead: int
    question: Sequence[int]
    check_layer: int = 1

    def logits(self, computed: np.ndarray, mask: Mask) -> np.ndarray:
        """Of the question, where the chunks' tokens at positions `computed` are computed again."""
        model, ids = self.model, np.concatenate([*self._cut(self.chunks), self.question])
        n, n_first = len(ids) - len(self.question), self.check_layer + 1
        pos, old = np.arange(len(ids)), self._cached()
        first = _Attend(model.groups, pos, pos, None)
        x = model.layers(model.embed(jnp.asarray(ids)), first, 0, n_first)
        rows = np.concatenate([computed, pos[n:]])
        sees = rows if mask == "position" else pos[len(ids) - len(rows) :]
        x = model.layers(x[rows], _Attend(model.groups, rows, sees, old), n_first, len(old))
        return np.asarray(model.head(x[n - len(ids) :]))

    def _cached(self) -> Kept:
        """Entries of all tokens as the chunks have them; zeros for the question's."""
        alone = [self._alone(np.asarray(x)) for x in self.chunks]
        behind = ((0, len(self.question)), (0, 0), (0, 0))

        def joined(layer: int, side: int) -> Array:
            return jnp.pad(jnp.concatenate(self._cut([x[layer][side] for x in alone])), behind)

        return {layer: (joined(layer, 0), joined(layer, 1)) for layer in alone[0]}

    def _cut(self, by_chunk: Sequence[Any]) -> list[Any]:
        """What belongs to the chunks' tokens, without the leads of all but the first."""
        return [x[self.n_lead if i else 0 :] for i, x in enumerate(by_chunk)]

    def _alone(self, ids: np.ndarray) -> Kept:
        pos = np.arange(len(ids))
        attend = _Attend(self.model.groups, pos, pos, None)
        n_layers = sum(len(group.layers) for group in self.model.groups)
        self.model.layers(self.model.embed(jnp.asarray(ids)), attend, 0, n_layers)
        return attend.kept


def _rotated(group: GroupSpec, x: Array, pos: np.ndarray) -> Array:
    if group.rope is None:
        return x
    cos, sin = rope.angles(jnp.asarray(rope.frequencies(group.rope, len(pos))), jnp.asarray(pos))
    return rope.rotate(x, cos, sin, group.rope.layout)

"""A decoder whose layers read keys and values of others, and the same in NumPy with lists.

The oracle has a list of (position, unrotated key, value) a layer that keeps them, hands keys and
values from layer to layer by name, and rotates every key anew to where it stands now.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvrt import GroupSpec, MaskSpec, RopeSpec
from tests.oracle import rotated

N_VOCAB, D, BASE = 32, 8, 100.0
CLA2, CLA3 = (0, 0, 2, 2), (0, 0, 0, 3, 3, 3)
UNEVEN = (0, 0, 2, 2, 2, 5, 5, 5)


def mlkv_map(n_layers, m):
    """By layer, the newest of m layers that have keys and values (MLKV's rule)."""
    own = [0, *(int((i + 1) * n_layers / m) for i in range(m - 1))]
    return tuple(max(x for x in own if x <= i) for i in range(n_layers))


class SharedLm(nnx.Module):
    """Layer i reads keys and values of kv_of[i]; layers of one mask are a group."""

    recurrent = None

    def __init__(self, kv_of, *, masks=None, n_heads=4, n_kv_heads=2, seed=0):
        rng = np.random.default_rng(seed)
        self.kv_of, self.n_vocab = tuple(kv_of), N_VOCAB
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.masks = tuple(masks or [MaskSpec()] * len(kv_of))
        self.groups = tuple(self.group_of(mask) for mask in dict.fromkeys(self.masks))
        width = n_heads * D

        def weight(*shape):
            return nnx.Param(jax.device_put(rng.standard_normal(shape, np.float32)))

        self.embedding, self.out = weight(N_VOCAB, width), weight(width, N_VOCAB)
        self.q = nnx.List([weight(width, width) for _ in kv_of])
        own = [i for i, read in enumerate(kv_of) if i == read]
        self.kv = nnx.Dict({str(i): weight(width, 2 * n_kv_heads * D) for i in own})

    def group_of(self, mask):
        pairs = [(i, x) for i, x in enumerate(self.kv_of) if self.masks[i] == mask]
        return GroupSpec(
            layers=tuple(i for i, read in pairs if i == read),
            kv_of=tuple((i, read) for i, read in pairs if i != read),
            n_kv_heads=self.n_kv_heads,
            head_dim=D,
            rope=RopeSpec(n_rot=D, base=BASE),
            mask=mask,
        )

    def shardings(self):
        return {}

    def __call__(self, tokens, attend, out_ids):
        return self.head(self.layers(self.embed(tokens), attend, 0, len(self.kv_of))[out_ids])

    def embed(self, tokens):
        return self.embedding[...][tokens]

    def layers(self, x, attend, first, last):
        for i in range(first, last):
            q = (0.1 * x @ self.q[i][...]).reshape(x.shape[0], -1, D)
            k = v = None
            if self.kv_of[i] == i:
                k, v = jnp.split((0.1 * x @ self.kv[str(i)][...]).reshape(len(x), -1, D), 2, axis=1)
            x = x + attend(i, q, k, v).reshape(x.shape)
        return x

    def head(self, x):
        return x @ self.out[...] * 0.05


@dataclasses.dataclass
class Row:
    """A cached token: its position, and keys and values by layer that keeps them."""

    pos: int
    k: dict
    v: dict


class Dense:
    """One sequence of a `SharedLm`, in float64."""

    def __init__(self, model):
        self.model, self.rows = model, []
        self.w = {
            name: np.asarray(x[...], np.float64)
            for name, x in (("embedding", model.embedding), ("out", model.out))
        }
        self.q = [np.asarray(x[...], np.float64) for x in model.q]
        self.kv = {int(i): np.asarray(x[...], np.float64) for i, x in model.kv.items()}

    def step(self, tokens):
        """Logits of tokens that follow, which are kept."""
        first = max((r.pos for r in self.rows), default=-1) + 1
        new = [Row(first + i, {}, {}) for i in range(len(tokens))]
        x = self.w["embedding"][list(tokens)]
        for layer, read in enumerate(self.model.kv_of):
            q = (0.1 * x @ self.q[layer]).reshape(len(x), -1, D)
            if read == layer:
                kv = (0.1 * x @ self.kv[layer]).reshape(len(x), -1, D)
                for row, k, v in zip(new, *np.split(kv, 2, axis=1), strict=True):
                    row.k[layer], row.v[layer] = k, v
            rows = [*self.rows, *new]
            out = self.attend(q, new, [(r.pos, r.k[read], r.v[read]) for r in rows], layer)
            x = x + out.reshape(x.shape)
        self.rows += new
        return x @ self.w["out"] * 0.05

    def attend(self, q, new, rows, layer):
        """Attention over rows of (pos, k, v), those of the tokens themselves among them."""
        mask, at = self.model.masks[layer], np.array([r.pos for r in new])
        pos, k, v = (np.array(x) for x in zip(*rows, strict=True))
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x, group, axis=1) for x in (rotated(k, pos), v))
        s = np.einsum("thd,chd->thc", rotated(q, at), k) * D**-0.5
        sees = pos <= at[:, None]
        if mask.kind == "window":
            sees &= at[:, None] - pos < mask.size
        s = np.where(sees[:, None], s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return np.einsum("thc,chd->thd", p / p.sum(-1, keepdims=True), v)

    def remove(self, p0, p1):
        self.rows = [r for r in self.rows if not p0 <= r.pos < p1]

    def move(self, p0, d):
        for row in self.rows:
            row.pos += d if row.pos >= p0 else 0

    def copy(self):
        other = Dense(self.model)
        other.rows = [dataclasses.replace(r) for r in self.rows]
        return other

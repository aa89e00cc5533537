"""A decoder that keeps one latent a token (MLA), and the same in NumPy in its plain form.

The decoder reads the latents themselves, with weights that were multiplied into queries and
outputs (absorbed). The oracle has a list of (position, latent, unrotated key) a layer, makes keys
and values of every head of them, and attends as any multi-head attention does.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvrt import GroupSpec, MaskSpec, RopeSpec

N_VOCAB, BASE = 32, 100.0
HEADS, RANK, NOPE, ROPE, VALUE = 4, 32, 16, 8, 12
WIDTH = 24
SCALE = (NOPE + ROPE) ** -0.5


class LatentLm(nnx.Module):
    """Layers of latent attention on a residual stream; those of one mask are a group."""

    recurrent = None

    def __init__(self, *, n_layers=2, masks=None, layout="norm", scale=SCALE, kv_of=None, seed=0):
        rng = np.random.default_rng(seed)
        self.n_vocab, self.n_layers = N_VOCAB, n_layers
        self.masks = tuple(masks or [MaskSpec()] * n_layers)
        self.layout, self.kv_of = layout, tuple(kv_of or range(n_layers))
        self.groups = tuple(self.group_of(mask, scale) for mask in dict.fromkeys(self.masks))

        def weight(*shape):
            return nnx.Param(jax.device_put(rng.standard_normal(shape, np.float32)))

        self.embedding, self.out = weight(N_VOCAB, WIDTH), weight(WIDTH, N_VOCAB)
        n = range(n_layers)
        self.q = nnx.List([weight(WIDTH, HEADS * (NOPE + ROPE)) for _ in n])
        self.kv = nnx.List([weight(WIDTH, RANK + ROPE) for _ in n])
        self.up_k = nnx.List([weight(HEADS, NOPE, RANK) for _ in n])
        self.up_v = nnx.List([weight(HEADS, RANK, VALUE) for _ in n])
        self.o = nnx.List([weight(HEADS * VALUE, WIDTH) for _ in n])

    def group_of(self, mask, scale):
        pairs = [(i, x) for i, x in enumerate(self.kv_of) if self.masks[i] == mask]
        return GroupSpec(
            layers=tuple(i for i, read in pairs if i == read),
            kv_of=tuple((i, read) for i, read in pairs if i != read),
            n_kv_heads=1,
            head_dim=RANK + ROPE,
            latent_rank=RANK,
            rope=RopeSpec(n_rot=ROPE, base=BASE, layout=self.layout) if self.layout else None,
            mask=mask,
            scale=scale,
        )

    def shardings(self):
        return {}

    def __call__(self, tokens, attend, out_ids):
        return self.head(self.layers(self.embed(tokens), attend, 0, self.n_layers)[out_ids])

    def embed(self, tokens):
        return self.embedding[...][tokens]

    def layers(self, x, attend, first, last):
        for i in range(first, last):
            self.before(i, x, attend)
            q = (0.3 * x @ self.q[i][...]).reshape(len(x), HEADS, NOPE + ROPE)
            plain, rotary = jnp.split(q, [NOPE], axis=2)
            absorbed = jnp.einsum("thn,hnr->thr", plain, self.up_k[i][...]) * 0.3
            row = None
            if self.kv_of[i] == i:
                latent, key = jnp.split(0.3 * x @ self.kv[i][...], [RANK], axis=1)
                latent = latent / jnp.sqrt(jnp.mean(latent**2, axis=1, keepdims=True) + 1e-6)
                row = jnp.concatenate([latent, key], axis=1)[:, None]
            out = attend(i, jnp.concatenate([absorbed, rotary], axis=2), row, None)
            values = jnp.einsum("thr,hrv->thv", out, self.up_v[i][...]) * 0.3
            x = x + 0.3 * values.reshape(len(x), -1) @ self.o[i][...]
        return x

    def before(self, i, x, attend):
        """What a layer says to `attend` before it attends; nothing here."""

    def head(self, x):
        return x @ self.out[...] * 0.1


def rotated(x, pos, layout):
    """x [..., ROPE] rotated to pos [...], as it is without a layout."""
    if layout is None:
        return x
    angle = np.multiply.outer(np.asarray(pos), BASE ** (-2 * np.arange(ROPE // 2) / ROPE))
    c, s = np.cos(angle), np.sin(angle)
    if layout == "norm":
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * c - b * s, a * s + b * c], -1)


@dataclasses.dataclass
class Row:
    """A cached token: its position, and latents and keys by layer."""

    pos: int
    latent: dict
    key: dict
    index: dict = dataclasses.field(default_factory=dict)


class Plain:
    """One sequence of a `LatentLm`, in float64, with keys and values of every head."""

    def __init__(self, model):
        self.model, self.rows = model, []

    def weight(self, name, i=None):
        found = getattr(self.model, name)
        return np.asarray((found if i is None else found[i])[...], np.float64)

    def step(self, tokens):
        """Logits of tokens that follow, which are kept."""
        first = max((r.pos for r in self.rows), default=-1) + 1
        new = [Row(first + i, {}, {}) for i in range(len(tokens))]
        x = self.weight("embedding")[list(tokens)]
        for i, read in enumerate(self.model.kv_of):
            q = (0.3 * x @ self.weight("q", i)).reshape(len(x), HEADS, -1)
            if read == i:
                latent, key = np.split(0.3 * x @ self.weight("kv", i), [RANK], axis=1)
                latent = latent / np.sqrt((latent**2).mean(1, keepdims=True) + 1e-6)
                for row, c, k in zip(new, latent, key, strict=True):
                    row.latent[i], row.key[i] = c, k
            self.before(i, x, new)
            out = self.attend(q, new, (i, read))
            x = x + 0.3 * out.reshape(len(x), -1) @ self.weight("o", i)
        self.rows += new
        return x @ self.weight("out") * 0.1

    def attend(self, q, new, layers):
        """Multi-head attention with keys and values of each head."""
        i, read = layers
        mask, at = self.model.masks[i], np.array([r.pos for r in new])
        rows = [*self.rows, *new]
        pos = np.array([r.pos for r in rows])
        latent, key = (
            np.array([r.latent[read] for r in rows]),
            np.array([r.key[read] for r in rows]),
        )
        k = 0.3 * np.einsum("cr,hnr->chn", latent, self.weight("up_k", i))
        there = rotated(key, pos, self.model.layout)
        k = np.concatenate([k, np.repeat(there[:, None], HEADS, axis=1)], axis=2)
        v = 0.3 * np.einsum("cr,hrv->chv", latent, self.weight("up_v", i))
        here = rotated(np.swapaxes(q[..., NOPE:], 0, 1), at, self.model.layout)
        q = np.concatenate([q[..., :NOPE], np.swapaxes(here, 0, 1)], axis=2)
        s = np.einsum("thd,chd->thc", q, k) * SCALE
        sees = pos <= at[:, None]
        if mask.kind == "window":
            sees &= at[:, None] - pos < mask.size
        sees = self.chosen(i, rows, sees)
        s = np.where(sees[:, None], s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return np.einsum("thc,chv->thv", p / p.sum(-1, keepdims=True), v)

    def before(self, i, x, new):
        """What rows have of a layer beside their latents; nothing here."""

    def chosen(self, i, rows, sees):
        """Which rows each token reads, of those that it sees [T, C]; all here."""
        del i, rows
        return sees

    def remove(self, p0, p1):
        self.rows = [r for r in self.rows if not p0 <= r.pos < p1]

    def move(self, p0, d):
        for row in self.rows:
            row.pos += d if row.pos >= p0 else 0

    def copy(self):
        other = type(self)(self.model)
        other.rows = [dataclasses.replace(r) for r in self.rows]
        return other

"""A model whose rows are looked up in tables, over layers of every kind: all of it is in NumPy too.

Its layers do not feed each other, so that a wrong cell in one is seen as it is.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvrt import GroupSpec, Indexed, MaskSpec, RecurrentSpec, RopeSpec
from tests import deltatoy

N_VOCAB, N_HEADS, N_KV, D = 128, 4, 2, 32
WIDTH = N_HEADS * D
assert WIDTH == N_VOCAB, "attention's output is the logits"
ROPE = RopeSpec(n_rot=D, base=100.0)
# Tokens that a query reads by its indexer, and a factor of all scores.
N_INDEXED, INDEX_SCALE = 16, D**-0.5
MASKS = {
    "full": MaskSpec(),
    "shared": MaskSpec(),
    "produced": MaskSpec(),
    "latent": MaskSpec(),
    "indexed": MaskSpec(),
    "window": MaskSpec(kind="window", size=9),
    "wide_window": MaskSpec(kind="window", size=24),
    "sink_window": MaskSpec(kind="window", size=9, n_sink=2),
    "chunked": MaskSpec(kind="chunked", size=12),
}
DECAY = 0.9
STATES = {"recurrent": ((3, WIDTH), (WIDTH,)), "delta": deltatoy.shapes(WIDTH, N_HEADS)}


@functools.cache
def tables():
    """q, k, v of every token, and the recurrence's mix of its newest three inputs."""
    rng = np.random.default_rng(0)
    shapes = [(N_VOCAB, N_HEADS, D), (N_VOCAB, N_KV, D), (N_VOCAB, N_KV, D), (3, WIDTH)]
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def drawn(seed, n):
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, N_VOCAB, n).tolist()


def masks_of(layers):
    """Masks of the attention layers that keep keys and values."""
    return [MASKS[name] for name in layers.split("+") if name not in STATES]


def state_of(layers):
    """The layer that keeps a state: "recurrent", "delta" or none of them."""
    return next((name for name in layers.split("+") if name in STATES), None)


def pieces(tokens, n):
    """Some tokens, n at a time."""
    for start in range(0, len(tokens), n):
        yield tokens[start : start + n]


def shares(layers):
    """Whether two layers read the same keys and values, which the first or neither makes."""
    return layers in ("shared", "produced")


def is_latent(layers):
    """Whether values are the first channels of the keys, which all heads share."""
    return layers in ("latent", "indexed")


def index_weights(q):
    """Weights of two index heads, of queries [..., N_HEADS, D]."""
    return q[..., :2, 0] * INDEX_SCALE


def give_index(layer, attend, q, k, v):
    """Index queries of the first two heads, and keys of the second kv head."""
    keys = jnp.concatenate([v, k], 2)[:, 1:]
    attend.index(layer, jnp.concatenate([q, q], 2)[:, :2], keys, index_weights(q))


class PlainModel(nnx.Module):
    """A layer for each part of a name, e.g. "full+recurrent"; their outputs are added up.

    In "shared" a second layer reads keys and values of the first, with its heads in reverse order.
    In "produced" both read those of a layer that has no queries, and run for wanted tokens alone.
    In "latent" the first head's values are the latent and its keys what is rotated; queries come
    to the latent with their heads in reverse order.
    In "indexed" such queries read few tokens, by index keys made likewise of the second head, and
    index queries of the first two.
    """

    def __init__(self, layers):
        group = GroupSpec(layers=(0,), n_kv_heads=N_KV, head_dim=D, rope=ROPE)
        masks = masks_of(layers)
        self.groups = tuple(
            dataclasses.replace(group, layers=(i,), mask=mask) for i, mask in enumerate(masks)
        )
        if shares(layers):
            readers = ((1, 0),) if layers == "shared" else ((1, 0), (2, 0))
            self.groups = (dataclasses.replace(group, kv_of=readers),)
        if is_latent(layers):
            sizes = {"n_kv_heads": 1, "head_dim": 2 * D, "latent_rank": D, "scale": D**-0.5}
            self.groups = (dataclasses.replace(group, **sizes),)
        if layers == "indexed":
            by = Indexed(n_cells=N_INDEXED, keys_of=((0, 1),))
            (latents,) = self.groups
            keys = dataclasses.replace(latents, layers=(1,))
            self.groups = (dataclasses.replace(latents, indexed=by), keys)
        self.state = state_of(layers)
        self.recurrent = self.state and RecurrentSpec(
            layers=(len(masks),), shapes=STATES[self.state]
        )
        self.n_vocab = N_VOCAB
        self.q, self.k, self.v, self.mix = (nnx.Param(jnp.asarray(x)) for x in tables())

    def shardings(self):
        return {}

    def __call__(self, tokens, attend, out_ids):
        q, k, v = (x[...][tokens] for x in (self.q, self.k, self.v))
        flat = q.reshape(tokens.shape[0], -1)
        if self.groups and self.groups[0].indexed:
            give_index(0, attend, q, k, v)
        if self.groups and self.groups[0].latent_rank:
            q, k = jnp.concatenate([q[:, ::-1], q], 2), jnp.concatenate([v, k], 2)[:, :1]
            v = None
        if self.groups and len(self.groups[0].kv_of) == 2:
            attend.produce(0, k, v)
            read, q = attend.for_tokens(out_ids), q[out_ids]
            both = read(1, q, None, None) + read(2, q[:, ::-1], None, None)
            return both.reshape(q.shape[0], -1)
        n_attend = 1 if self.groups and self.groups[0].indexed else len(self.groups)
        out = sum((attend(i, q, k, v).reshape(flat.shape) for i in range(n_attend)), 0.0)
        if self.groups and self.groups[0].kv_of:
            out = out + attend(1, q[:, ::-1], None, None).reshape(flat.shape)
        if self.state == "delta":
            out = out + deltatoy.recur(attend, len(self.groups), flat, self.mix[...], N_HEADS)
        if self.state == "recurrent":

            def step(state, row):
                window, total = state
                window = jnp.concatenate([window[1:], row[0][None]])
                total = DECAY * total + jnp.tanh(jnp.sum(window * self.mix[...], axis=0))
                return (window, total), total

            out = out + attend.recur(len(self.groups), step, (flat,))
        return out[out_ids]


class PartedModel(PlainModel):
    """The same with a layer of all positions in front, which can be run in parts.

    Its residual stream is what a token looks up, and behind that the sum so far. States are left
    out: whoever runs parts of a model has refused them.
    """

    def __init__(self, layers):
        super().__init__(layers)
        front = GroupSpec(layers=(0,), n_kv_heads=N_KV, head_dim=D, rope=ROPE)
        behind = [
            dataclasses.replace(
                group,
                layers=tuple(i + 1 for i in group.layers),
                kv_of=tuple((i + 1, j + 1) for i, j in group.kv_of),
                indexed=group.indexed and Indexed(n_cells=N_INDEXED, keys_of=((1, 2),)),
            )
            for group in self.groups
        ]
        self.groups = (front, *behind)
        n_index = sum(len(group.indexed.keys_of) for group in self.groups if group.indexed)
        self.n_layers = sum(len(group.all_layers) for group in self.groups) - n_index
        if self.recurrent:
            self.recurrent = dataclasses.replace(self.recurrent, layers=(self.n_layers,))

    def __call__(self, tokens, attend, out_ids):
        return self.head(self.layers(self.embed(tokens), attend, 0, self.n_layers)[out_ids])

    def embed(self, tokens):
        looked_up = [x[...][tokens].reshape(tokens.shape[0], -1) for x in (self.q, self.k, self.v)]
        return jnp.concatenate([*looked_up, jnp.zeros((tokens.shape[0], WIDTH))], axis=1)

    def layers(self, x, attend, first, last):
        for layer in range(first, last):
            x = x.at[:, -WIDTH:].add(self._layer(layer, x, attend))
        return x

    def head(self, x):
        return x[:, -WIDTH:]

    def _layer(self, layer, x, attend):
        n, ends = x.shape[0], (WIDTH, WIDTH + N_KV * D, WIDTH + 2 * N_KV * D)
        q, k, v = (part.reshape(n, -1, D) for part in jnp.split(x, ends, axis=1)[:3])
        group = next(g for g in self.groups if layer in g.all_layers)
        if group.indexed:
            give_index(layer, attend, q, k, v)
        if group.latent_rank:
            q, k = jnp.concatenate([q[:, ::-1], q], 2), jnp.concatenate([v, k], 2)[:, :1]
            return attend(layer, q, k, None).reshape(n, -1)
        if len(group.kv_of) == 2 and layer in group.layers:
            attend.produce(layer, k, v)
            return jnp.zeros((n, WIDTH))
        if layer in group.layers:
            return attend(layer, q, k, v).reshape(n, -1)
        read = q if (layer, layer - 1) in group.kv_of and len(group.kv_of) == 2 else q[:, ::-1]
        return attend(layer, read, None, None).reshape(n, -1)

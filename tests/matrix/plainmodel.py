"""A model whose rows are looked up in tables, over layers of every kind: all of it is in NumPy too.

Its layers do not feed each other, so that a wrong cell in one is seen as it is.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvrt import GroupSpec, Indexed, MaskSpec, RecurrentSpec, RopeSpec
from kvrt.arrays import namespace
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
# Parts of a name that are several layers, and those that read the keys and values of the first.
LAYERS = {"shared": ("attend", "reversed"), "produced": ("produce", "read", "reversed")}
READERS = ("read", "reversed")


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

    Its residual stream is what a token looks up, and behind that the sum so far.
    In "shared" a second layer reads keys and values of the first, with its heads in reverse order.
    In "produced" both read those of a layer that has no queries, and run for wanted tokens alone.
    In "latent" the first head's values are the latent and its keys what is rotated; queries come
    to the latent with their heads in reverse order.
    In "indexed" such queries read few tokens, by index keys made likewise of the second head, and
    index queries of the first two.
    """

    def __init__(self, layers, has_front=False):
        """With `has_front` a layer of all positions comes before them."""
        names = ["full"] * has_front + layers.split("+")
        groups, parts = [], []
        for name in names:
            if name not in STATES:
                groups.append(group_of(name, len(parts)))
            parts += LAYERS.get(name, (name if name in STATES else "attend",))
        self.parts, self.n_layers = tuple(parts), len(parts)
        self.takes_numpy = set(self.parts) <= {"attend", "recurrent"}
        if layers == "indexed":
            last, index = self.n_layers - 1, self.n_layers
            by = Indexed(n_cells=N_INDEXED, keys_of=((last, index),))
            groups.append(dataclasses.replace(groups[-1], layers=(index,)))
            groups[-2] = dataclasses.replace(groups[-2], indexed=by)
        self.groups, state = tuple(groups), state_of(layers)
        self.recurrent = state and RecurrentSpec(layers=(parts.index(state),), shapes=STATES[state])
        self.n_vocab = N_VOCAB
        self.q, self.k, self.v, self.mix = (nnx.Param(jnp.asarray(x)) for x in tables())

    def shardings(self):
        return {}

    def __call__(self, tokens, attend, out_ids):
        last = self.n_layers - 2 if "produce" in self.parts else self.n_layers
        x = self.layers(self.embed(tokens), attend, 0, last)[out_ids]
        if last < self.n_layers:
            x = self.layers(x, attend.for_tokens(jnp.asarray(out_ids)), last, self.n_layers)
        return self.head(x)

    def embed(self, tokens):
        xp = namespace(tokens)
        looked_up = [x[...][tokens].reshape(tokens.shape[0], -1) for x in (self.q, self.k, self.v)]
        return xp.concatenate([*looked_up, xp.zeros((tokens.shape[0], WIDTH))], axis=1)

    def layers(self, x, attend, first, last):
        for layer in range(first, last):
            out = self._layer(layer, x, attend).reshape(x.shape[0], WIDTH)
            x = namespace(x).concatenate([x[:, :-WIDTH], x[:, -WIDTH:] + out], axis=1)
        return x

    def head(self, x):
        return x[:, -WIDTH:]

    def layer_kinds(self):
        """Weights are those of the layer with a state; what else differs, groups and states say."""
        return [
            (part, ("mix",) if part in STATES else ("none", i)) for i, part in enumerate(self.parts)
        ]

    def _layer(self, layer, x, attend):
        part, flat = self.parts[layer], x[:, :WIDTH]
        if part == "delta":
            return deltatoy.recur(attend, layer, flat, self.mix[...], N_HEADS)
        if part == "recurrent":
            return self._recur(layer, flat, attend)
        ends = (WIDTH, WIDTH + N_KV * D, WIDTH + 2 * N_KV * D)
        heads = namespace(x).split(x, ends, axis=1)[:3]  # of no token too, where none is wanted
        q, k, v = (y.reshape(x.shape[0], y.shape[1] // D, D) for y in heads)
        if part in READERS:
            return attend(layer, q[:, ::-1] if part == "reversed" else q, None, None)
        if part == "produce":
            attend.produce(layer, k, v)
            return jnp.zeros((x.shape[0], WIDTH))
        group = next(g for g in self.groups if layer in g.layers)
        if group.indexed:
            give_index(layer, attend, q, k, v)
        if group.latent_rank:
            q, k = jnp.concatenate([q[:, ::-1], q], 2), jnp.concatenate([v, k], 2)[:, :1]
            return attend(layer, q, k, None)
        return attend(layer, q, k, v)

    def _recur(self, layer, x, attend):
        """A sum that decays, of what a window of three inputs gives."""

        xp = namespace(x)

        def step(state, row):
            window, total = state
            window = xp.concatenate([window[1:], row[0][None]])
            total = DECAY * total + xp.tanh(xp.sum(window * self.mix[...], axis=0))
            return (window, total), total

        return attend.recur(layer, step, (x,))


def group_of(name, first):
    """The layers of a part of a name, from the first on, that keep or read keys and values."""
    parts = list(enumerate(LAYERS.get(name, ("attend",)), first))
    readers = tuple((i, first) for i, part in parts if part in READERS)
    kept = tuple(i for i, part in parts if part not in READERS)
    sizes = {"n_kv_heads": N_KV, "head_dim": D}
    if is_latent(name):
        sizes = {"n_kv_heads": 1, "head_dim": 2 * D, "latent_rank": D, "scale": D**-0.5}
    return GroupSpec(layers=kept, kv_of=readers, mask=MASKS[name], rope=ROPE, **sizes)

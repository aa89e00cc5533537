"""Tiny models for tests: a decoder with random weights, and one that shows attention bare."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from kvrt import GroupSpec, MaskSpec, RecurrentSpec, RopeSpec
from kvrt.arrays import namespace
from tests import deltatoy


class RowModel(nnx.Module):
    """Looks q, k and v of each token up in a table and returns its attention output as logits.

    So a test knows every row that enters the cache, and sees what attention makes of them.
    """

    recurrent, takes_numpy = None, True

    def __init__(
        self, *, n_vocab=32, n_heads=4, n_kv_heads=2, head_dim=8, seed=0, group=None, masks=()
    ):
        rng = np.random.default_rng(seed)
        rope = RopeSpec(n_rot=head_dim, base=100.0)
        self.group = group or GroupSpec(
            layers=(0,), n_kv_heads=n_kv_heads, head_dim=head_dim, rope=rope
        )
        # Further layers look at the same rows through other masks; what they see is added up.
        others = [
            dataclasses.replace(self.group, layers=(i,), mask=mask)
            for i, mask in enumerate(masks, 1)
        ]
        self.groups = (self.group, *others)
        self.n_heads, self.head_dim, self.n_tokens = n_heads, head_dim, n_vocab

        def table(n):
            return nnx.Param(
                jax.device_put(rng.standard_normal((n_vocab, n, head_dim), np.float32))
            )

        self.q, self.k, self.v = table(n_heads), table(n_kv_heads), table(n_kv_heads)

    @property
    def n_vocab(self):
        # The width of the logits; ids beyond n_tokens would read the table's last row.
        return self.n_tokens

    def shardings(self):
        return {}

    def __call__(self, tokens, attend, out_ids):
        rows = [x[...][tokens] for x in (self.q, self.k, self.v)]
        out = sum(attend(layer, *rows) for layer in range(len(self.groups)))
        return out.reshape(tokens.shape[0], -1)[out_ids]


class ToyLm(nnx.Module):
    """Layers of attention on a residual stream, random weights: text without sense, but exact."""

    recurrent, takes_numpy = None, True

    def __init__(self, *, n_vocab=64, n_layers=2, n_kv_heads=2, head_dim=16, seed=0, masks=None):
        rng = np.random.default_rng(seed)
        rope = RopeSpec(n_rot=head_dim, base=100.0)
        # One group of all layers, or one a mask.
        layers = [tuple(range(n_layers))] if masks is None else [(i,) for i in range(n_layers)]
        self.groups = tuple(
            GroupSpec(layers=of, n_kv_heads=n_kv_heads, head_dim=head_dim, rope=rope, mask=mask)
            for of, mask in zip(layers, masks or [MaskSpec()], strict=True)
        )
        self.n_vocab, self.n_layers = n_vocab, n_layers
        self.n_heads, self.n_kv_heads = 2 * n_kv_heads, n_kv_heads
        width = self.n_heads * head_dim

        def weight(*shape):
            return nnx.Param(jax.device_put(rng.standard_normal(shape, np.float32)))

        self.embedding, self.out = weight(n_vocab, width), weight(width, n_vocab)
        self.qkv = nnx.List([weight(width, 2 * width) for _ in range(n_layers)])

    def shardings(self):
        paths = [("embedding",), *(("qkv", i) for i in range(self.n_layers))]
        return dict.fromkeys(paths, jax.P("tensor"))

    def __call__(self, tokens, attend, out_ids):
        return self.head(self.layers(self.embed(tokens), attend, 0, self.n_layers)[out_ids])

    def embed(self, tokens):
        return self.embedding[...][tokens]

    def layers(self, x, attend, first, last):
        for layer in range(first, last):
            n = self.n_heads + self.n_kv_heads
            rows = (0.2 * x @ self.qkv[layer][...]).reshape(x.shape[0], n + self.n_kv_heads, -1)
            q, k, v = rows[:, : self.n_heads], rows[:, self.n_heads : n], rows[:, n:]
            x = x + attend(layer, q, k, v).reshape(x.shape)
        return x

    def head(self, x):
        return x @ self.out[...] * 0.2


class KindedLm(ToyLm):
    """The same, whose layers of one mask are alike: it runs by layer."""

    def layer_kinds(self):
        masks = {i: g.mask for g in self.groups for i in g.layers}
        return [(masks[i], ("qkv", i)) for i in range(self.n_layers)]


def windowed(model_group: GroupSpec, mask: MaskSpec) -> GroupSpec:
    return dataclasses.replace(model_group, mask=mask)


def tables(model: RowModel):
    """q, k and v of every token, as NumPy."""
    return tuple(np.asarray(x[...]) for x in (model.q, model.k, model.v))


def allclose(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def n_leaves(tree) -> int:
    return len(jax.tree.leaves(tree))


class HybridLm(nnx.Module):
    """Attention in layer 0 and a recurrence in layer 1; or the recurrence alone.

    The state is a window of three inputs and a running sum, so that every token counts.
    """

    takes_numpy = True

    def __init__(self, *, n_vocab=32, width=16, seed=0, attention=True, mask=None):
        rng = np.random.default_rng(seed)
        rope = RopeSpec(n_rot=8, base=100.0)
        mask = mask or MaskSpec()
        group = GroupSpec(layers=(0,), n_kv_heads=1, head_dim=8, rope=rope, mask=mask)
        self.groups = (group,) if attention else ()
        self.recurrent = RecurrentSpec(layers=(1,), shapes=((3, width), (width,)))
        self.n_vocab, self.width = n_vocab, width

        def weight(*shape):
            return nnx.Param(jax.device_put(rng.standard_normal(shape, np.float32)))

        self.embedding, self.head = weight(n_vocab, width), weight(width, n_vocab)
        self.mix = weight(3, width)

    def shardings(self):
        return {("embedding",): jax.P("tensor")}

    def __call__(self, tokens, attend, out_ids):
        x = self.embedding[...][tokens]
        if self.groups:
            q = x.reshape(x.shape[0], 2, 8)
            x = x + attend(0, q, q[:, :1], q[:, 1:]).reshape(x.shape)
        return (x + self.recur(attend, x))[out_ids] @ self.head[...]

    def recur(self, attend, x):
        xp = namespace(x)

        def step(state, row):
            window, total = state
            window = xp.concat([window[1:], row[0][None]])
            mixed = xp.sum(window * self.mix[...], axis=0)
            total = 0.9 * total + xp.tanh(mixed)
            return (window, total), total

        return attend.recur(1, step, (x,))


class DeltaLm(HybridLm):
    """The same with the gated delta rule, which runs prompts in chunks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.recurrent = RecurrentSpec(layers=(1,), shapes=deltatoy.shapes(self.width, 2))

    def recur(self, attend, x):
        return deltatoy.recur(attend, 1, x, self.mix[...], 2)

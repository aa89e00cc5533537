"""A `LatentLm` whose queries read the tokens that an indexer chooses, and the same in NumPy.

The oracle has an unrotated index key a token and layer, ranks all that a token sees by sorting
(score, position), and attends to the best with keys and values of every head.
"""

import dataclasses

import jax
import numpy as np
from flax import nnx

from kvrt import GroupSpec, Indexed, RopeSpec
from tests.latentlm import BASE, ROPE, WIDTH, LatentLm, Plain, rotated

# Two index heads: a score is often zero in both, and equal ones go by position.
INDEX_HEADS, PLAIN = 2, 6
INDEX = PLAIN + ROPE
N_CELLS = 5


class IndexedLm(LatentLm):
    """Each layer has index keys of PLAIN channels and of ROPE rotated ones, paired by halves."""

    def __init__(self, *, n_layers=2, n_cells=N_CELLS, seed=0):
        super().__init__(n_layers=n_layers, seed=seed)
        rng = np.random.default_rng(seed + 1)
        (latents,) = self.groups
        keys_of = tuple((i, n_layers + i) for i in range(n_layers))
        self.groups = (
            dataclasses.replace(latents, indexed=Indexed(n_cells=n_cells, keys_of=keys_of)),
            GroupSpec(
                layers=tuple(at for _, at in keys_of),
                n_kv_heads=1,
                head_dim=INDEX,
                latent_rank=PLAIN,
                rope=RopeSpec(n_rot=ROPE, base=BASE, layout="neox"),
                scale=1.0,
            ),
        )

        def weights(n):
            shapes = [(WIDTH, n)] * n_layers
            return nnx.List(
                [nnx.Param(jax.device_put(rng.standard_normal(s, "f4"))) for s in shapes]
            )

        self.index_q, self.index_k = weights(INDEX_HEADS * INDEX), weights(INDEX)
        self.index_w = weights(INDEX_HEADS)

    def before(self, i, x, attend):
        q = (x @ self.index_q[i][...]).reshape(len(x), INDEX_HEADS, INDEX)
        attend.index(i, q, (x @ self.index_k[i][...])[:, None], x @ self.index_w[i][...])


def turned(x, pos):
    """An index query or key [..., INDEX] rotated to its position."""
    return np.concatenate([x[..., :PLAIN], rotated(x[..., PLAIN:], pos, "neox")], -1)


class PlainIndexed(Plain):
    """One sequence of an `IndexedLm`; `wrong` chooses otherwise, for controls."""

    def __init__(self, model, wrong=None):
        super().__init__(model)
        self.wrong, self.asked, self.sets = wrong, {}, {}

    def before(self, i, x, new):
        q = (x @ self.weight("index_q", i)).reshape(len(x), INDEX_HEADS, INDEX)
        self.asked[i] = q, x @ self.weight("index_w", i)
        for row, k in zip(new, x @ self.weight("index_k", i), strict=True):
            row.index[i] = k

    def chosen(self, i, rows, sees):
        q, weights = self.asked[i]
        keys = np.array([turned(r.index[i], r.pos) for r in rows])
        n_cells, out = self.model.groups[0].indexed.n_cells, np.zeros_like(sees)
        for t, row in enumerate(rows[-len(q) :]):
            products = np.stack([turned(head, row.pos) @ keys.T for head in q[t]])
            scores = weights[t] @ np.maximum(products, 0.0)
            later = -1 if self.wrong == "later of equals" else 1
            order = [(-scores[c], later * rows[c].pos, c) for c in np.flatnonzero(sees[t])]
            if self.wrong == "recent":
                order = [(-rows[c].pos, c) for *_, c in order]
            out[t, [c for *_, c in sorted(order)[:n_cells]]] = True
        self.sets[i] = out
        return out

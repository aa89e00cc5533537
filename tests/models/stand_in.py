"""The plainest thing that a decoder can run on: one sequence, all rows kept, no cache."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvrt.store import rope


class StandIn:
    """Causal attention over `n_ctx` rows and recurrence by a scan; `memory` is what is kept."""

    def __init__(self, model, memory):
        self.memory = dict(memory)
        self.groups = {layer: g for g in model.groups for layer in g.layers}

    def __call__(self, layer, q, k, v, *, sinks=None):
        assert sinks is None
        group, first, n = self.groups[layer], self.memory["n"], q.shape[0]
        pos = first + jnp.arange(n)
        if group.rope:
            cos, sin = rope.angles(jnp.asarray(rope.frequencies(group.rope, 0)), pos)
            q, k = (rope.rotate(x, cos, sin, group.rope.layout) for x in (q, k))
        keys, values = self.memory["rows", layer]
        keys = jax.lax.dynamic_update_slice(keys, k, (first, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v, (first, 0, 0))
        self.memory["rows", layer] = keys, values
        times = q.shape[1] // k.shape[1]
        keys, values = jnp.repeat(keys, times, axis=1), jnp.repeat(values, times, axis=1)
        scale = group.head_dim**-0.5 if group.scale is None else group.scale
        scores = jnp.einsum("tqd,sqd->qts", q, keys) * scale
        seen = jnp.arange(keys.shape[0])[None, :] <= pos[:, None]
        weights = jax.nn.softmax(jnp.where(seen[None], scores, -1e30), axis=-1)
        return jnp.einsum("qts,sqd->tqd", weights, values)

    def recur(self, layer, step, inputs):
        self.memory["state", layer], out = jax.lax.scan(step, self.memory["state", layer], inputs)
        return out


def logits(decoder, tokens, parts, *, forget=False):
    """Logits of every token, read in parts of these lengths; may lose the states. `[T, V]`"""
    graph, weights = nnx.split(decoder)
    memory = {"n": jnp.int32(0)}
    for g in decoder.groups:
        zeros = jnp.zeros((len(tokens), g.n_kv_heads, g.head_dim))
        memory |= {("rows", layer): (zeros, zeros) for layer in g.layers}
    if decoder.recurrent:
        zeros = tuple(map(jnp.zeros, decoder.recurrent.shapes))
        memory |= {("state", layer): zeros for layer in decoder.recurrent.layers}
    # Keys of two kinds are no pytree's keys: they travel as a list.
    names = list(memory)

    @jax.jit
    def run(weights, values, part):
        model = nnx.merge(graph, weights)
        attend = StandIn(model, dict(zip(names, values, strict=True)))
        rows = model(part, attend, jnp.arange(part.shape[0]))
        attend.memory["n"] += part.shape[0]
        return rows, [attend.memory[name] for name in names]

    values, rows, first = list(memory.values()), [], 0
    for n in parts:
        part = jnp.asarray(tokens[first : first + n], jnp.int32)
        found, after = run(weights, values, part)
        lost = [forget and name[0] == "state" for name in names]
        values = [old if gone else new for old, new, gone in zip(values, after, lost, strict=True)]
        rows.append(np.asarray(found))
        first += n
    assert first == len(tokens)
    return np.concatenate(rows)

"""What a toy's layers call in a step of the NumPy device: attention and recurrences in float64.

A token sees what positions, owners and its block list allow, and no other cell of the cache.
"""

import functools

import numpy as np

from kvrt.attention.grouped import uses_grouped_positions
from kvrt.cells import owner_bits, place, vacate
from kvrt.cells.mask import visible
from kvrt.store import rope


class NumpyAttend:
    """The `Attend` of one step; `write` then puts the step's tokens into the cache."""

    def __init__(self, spec, cache, batch):
        self.spec, self.cache, self.batch, self.cells = spec, cache, batch, list(cache.cells)
        self.own, self.states = {}, {}
        self.group_of = {x: i for i, g in enumerate(spec.layout.groups) for x in g.all_layers}
        self.reads = {x: y for g in spec.layout.groups for x, y in g.kv_of}
        for i, places in zip(spec.layout.store_of, batch.places, strict=True):
            if places.fresh is not None:
                self.cells[i] = vacate(self.cells[i], places.fresh, self.extent(i).block_size)

    def extent(self, store):
        return self.spec.layout.stores[store].extent

    @functools.cache  # noqa: B019 (a step's, and gone with it)
    def sight(self, i):
        """Positions of the cells that some token of the step sees, its own tokens last; and who."""
        store, places, pos = self.spec.layout.store_of[i], self.batch.places[i], self.batch.pos
        cells, rule = self.cells[store], self.spec.layout.groups[i].mask
        bits = owner_bits(cells, self.batch.seq_ids)
        listed = np.zeros((len(pos), self.extent(store).n_blocks), int)
        n, lists = 0, places.seq_blocks
        if lists is not None:
            n = len(lists.tables)
            for row, table, k in zip(listed, lists.tables, lists.n_blocks, strict=False):
                np.add.at(row, table[:k], 1)
        if lists is not None and (runs := lists.shared) is not None:
            for table, k, members in zip(runs.tables, runs.n_blocks, runs.members, strict=True):
                np.add.at(listed, np.ix_(members[members < n], table[:k]), 1)
        np.add.at(listed, np.ix_(range(n, len(pos)), places.blocks[: places.n_blocks]), 1)
        assert listed.max(initial=0) <= 1, "a token reads a block twice"
        sees = visible(rule, cells.pos, cells.seqs, pos, bits)
        sees &= listed.repeat(self.extent(store).block_size, axis=1).astype(bool)
        used = np.flatnonzero(sees.any(axis=0))
        own = visible(rule, pos, bits, pos, bits)
        # A token with a list of its own is the only one of its sequence, and sees itself alone.
        own[:n] &= np.eye(n, len(pos), dtype=bool)
        both = np.concatenate([sees[:, used], own], axis=1)
        return used, np.concatenate([cells.pos[used], pos]), both

    def __call__(self, layer, q, k, v, *, sinks=None):
        i, read = self.group_of[layer], self.reads.get(layer, layer)
        group, pos, config = self.spec.layout.groups[i], self.batch.pos, self.spec.config
        if read == layer:
            sound = np.isfinite(v)
            self.own[layer] = np.where(sound, k, np.nan), np.where(sound, v, 0.0)
        (k, v), (used, k_pos, sees) = self.own[read], self.sight(i)

        def rotated(x, pos):
            return x if group.rope is None else rotate(x, pos, group.rope, config.n_ctx)

        if config.rope == "write" and read == layer:
            self.own[layer] = k, v = rotated(k, pos), v
        store, buffer = self.store_of(read)
        keys = np.concatenate([taken_keys(store.k[buffer], used), k])
        values = np.concatenate([taken_values(store.v[buffer], used), v])
        compared = rotated(keys, k_pos) if config.rope == "read" else keys
        scores = products(rotated(q, pos), compared)
        if uses_grouped_positions(group, config):
            n, w = config.self_extend.ga_n, config.self_extend.ga_w
            beyond = k_pos // n
            if config.rope == "read":
                moved = rotated(keys, beyond)
            else:  # they have their magnitude
                moved = rotate(keys, beyond - k_pos, group.rope, config.n_ctx, scale=1)
            far = products(rotated(q, pos // n + w - w // n), moved)
            scores = np.where((pos[:, None] - k_pos < w)[:, None, None], scores, far)
        scores = scores * group.score_scale
        if group.soft_cap is not None:
            scores = group.soft_cap * np.tanh(scores / group.soft_cap)
        weights = softmax(scores, sees[:, None, None], sinks)
        return np.einsum("thgc,chd->thgd", weights, values).reshape(q.shape)

    def store_of(self, layer):
        """The store of a layer that keeps keys, and which of its arrays they are."""
        i, layout = self.group_of[layer], self.spec.layout
        buffer = layout.buffers[i][layout.groups[i].layers.index(layer)]
        return self.cache.stores[layout.store_of[i]], buffer

    def recur(self, layer, step, inputs, *, chunk=None):
        tables = self.cache.states.tables[self.spec.layout.recurrent.layers.index(layer)]
        at, written, outputs = self.batch.states, {}, []
        self.states[layer] = []
        for i, (src, dst) in enumerate(zip(at.src.tolist(), at.dst.tolist(), strict=True)):
            old = written.get(src) or tuple(
                t[src] if src < len(t) else np.zeros_like(t[0]) for t in tables
            )
            new, output = step(old, tuple(x[i] for x in inputs))
            self.states[layer].append(new)
            outputs.append(output)
            if dst < len(tables[0]):
                written[dst] = new
        return np.stack(outputs)

    def write(self, stays):
        """The cells with the step's tokens that stay, whose keys, values and states are written."""
        layout, batch = self.spec.layout, self.batch
        for i, (at, places) in enumerate(zip(layout.store_of, batch.places, strict=True)):
            slots = np.where(stays, places.slots, self.extent(at).n_slots)
            kept = np.flatnonzero(slots < self.extent(at).n_slots)
            assert len(set(slots[kept])) == len(kept), "two tokens are written to one slot"
            for layer in layout.groups[i].layers:
                (store, buffer), (k, v) = self.store_of(layer), self.own[layer]
                put_keys(store.k[buffer], slots[kept], k[kept])
                put_values(store.v[buffer], slots[kept], v[kept])
            self.cells[at] = place(self.cells[at], slots, batch.pos, batch.seq_ids)
        for layer, states in self.states.items():
            tables = self.cache.states.tables[layout.recurrent.layers.index(layer)]
            for state, dst, stay in zip(states, batch.states.dst, stays, strict=True):
                if stay and dst < len(tables[0]):
                    for table, new in zip(tables, state, strict=True):
                        table[dst] = new
        return tuple(self.cells)


def products(q, k):
    """Products of queries [T, Q, D] and keys [C, H, D]: [T, H, Q / H, C]."""
    return np.einsum("thgd,chd->thgc", q.reshape(len(q), k.shape[1], -1, q.shape[2]), k)


def softmax(scores, sees, sinks):
    """Weights [T, H, G, C], zero where a token sees nothing; a sink takes some and has no value."""
    scores = np.where(sees, scores, -np.inf)
    if sinks is not None:
        logits = np.asarray(sinks).reshape(1, *scores.shape[1:3], 1)
        scores = np.concatenate([scores, logits.repeat(len(scores), axis=0)], axis=3)
    top = scores.max(axis=3, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(top == -np.inf, 0.0, top))
    weights = weights / np.maximum(weights.sum(axis=3, keepdims=True), np.finfo(float).tiny)
    return weights[..., : sees.shape[3]]


_frequencies = functools.cache(rope.frequencies)


def rotate(x, pos, spec, n_ctx, scale=None):
    """x [T, H, D] rotated by the angles of positions, or of changes of position with scale=1."""
    freqs = _frequencies(spec, n_ctx)
    theta = pos.astype(np.float32)[:, None, None] * freqs
    scale = rope.magnitude(spec, n_ctx) if scale is None else scale
    cos, sin, n = np.cos(theta) * scale, np.sin(theta) * scale, len(freqs)
    ends = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)), (slice(0, n), slice(n, 2 * n))
    one, other = ends[spec.layout == "neox"]
    out = np.array(x, np.float64)
    out[..., one] = x[..., one] * cos - x[..., other] * sin
    out[..., other] = x[..., one] * sin + x[..., other] * cos
    return out


def taken_keys(k, slots):
    """Keys [T, H, D] of some cells of an array [N, H, D, B]."""
    return k[slots // k.shape[3], :, :, slots % k.shape[3]]


def taken_values(v, slots):
    """Values [T, H, D] of some cells of an array [N, H, B, D]."""
    return v[slots // v.shape[2], :, slots % v.shape[2]]


def put_keys(k, slots, new):
    k[slots // k.shape[3], :, :, slots % k.shape[3]] = new


def put_values(v, slots, new):
    v[slots // v.shape[2], :, slots % v.shape[2]] = new

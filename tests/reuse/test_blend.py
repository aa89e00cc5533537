"""CacheBlend against a dense computation in float64 that knows no cache."""

import dataclasses

import numpy as np
import pytest
from toys import ToyLm

from kvrt import CacheConfig, Runtime
from kvrt.runtime.blend import Chunk, blend
from kvrt.reuse.blend import BlendSpec, chosen

N_LAYERS, LEAD = 4, 1
CONFIG = CacheConfig(n_ctx=128, n_seq_max=2, n_ubatch=16, block_size=32)


def rotated(x, pos, base=100.0):
    """RoPE of halves, as ToyLm's groups have it: [T, H, D]."""
    half = x.shape[-1] // 2
    angle = np.asarray(pos)[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Dense:
    """ToyLm in float64: keys unrotated and values of every layer, by rows."""

    def __init__(self, model):
        self.m = model
        self.embedding, self.out = (np.asarray(x[...], np.float64) for x in (model.embedding, model.out))
        self.qkv = [np.asarray(x[...], np.float64) for x in model.qkv]

    def project(self, layer, x):
        n, h = self.m.n_heads + self.m.n_kv_heads, self.m.n_heads
        rows = (0.2 * x @ self.qkv[layer]).reshape(len(x), n + self.m.n_kv_heads, -1)
        return rows[:, :h], rows[:, h:n], rows[:, n:]

    def attend(self, q, q_pos, k, v, k_pos):
        q, k = rotated(q, q_pos), rotated(k, k_pos)
        group = self.m.n_heads // self.m.n_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        s = np.where(np.asarray(k_pos)[None, None] <= np.asarray(q_pos)[None, :, None], s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", p, v).reshape(len(q), -1)

    def prefill(self, ids):
        x, pos, kv = self.embedding[ids], np.arange(len(ids)), []
        for layer in range(N_LAYERS):
            q, k, v = self.project(layer, x)
            x = x + self.attend(q, pos, k, v, pos)
            kv.append((k, v))
        return x @ self.out * 0.2, kv

    def blend(self, chunks, suffix, spec):
        """Logits of the suffix and what each layer keeps, by the paper's steps."""
        alone = [self.prefill(c)[1] for c in chunks]
        cut = [0 if i == 0 else LEAD for i in range(len(chunks))]
        ids = np.concatenate([*(c[n:] for c, n in zip(chunks, cut, strict=True)), suffix])
        n, pos = len(ids) - len(suffix), np.arange(len(ids))
        old = [
            [np.concatenate([kv[layer][side][m:] for kv, m in zip(alone, cut, strict=True)]) for side in (0, 1)]
            for layer in range(N_LAYERS)
        ]
        x, kept = self.embedding[ids], []
        for layer in range(spec.check_layer + 1):
            q, k, v = self.project(layer, x)
            x = x + self.attend(q, pos, k, v, pos)
            kept.append((k, v))
        k, v = kept[-1]
        apart = np.stack([((a[:n] - b) ** 2).sum((1, 2)) for a, b in zip((k, v), old[spec.check_layer], strict=True)])
        sizes = [len(c) - m for c, m in zip(chunks, cut, strict=True)]
        rows = np.concatenate([chosen(apart, sizes, spec), np.arange(n, len(ids))])
        x = x[rows]
        for layer in range(spec.check_layer + 1, N_LAYERS):
            q, k, v = self.project(layer, x)
            fused = [np.concatenate([o, np.zeros((len(suffix), *o.shape[1:]))]) for o in old[layer]]
            fused[0][rows], fused[1][rows] = k, v
            x = x + self.attend(q, pos[rows], *fused, pos)
            kept.append(tuple(fused))
        return (x @ self.out * 0.2)[-1], kept, apart, rows[: len(rows) - len(suffix)]


def texts(seed=0, sizes=(21, 17, 19)):
    rng = np.random.default_rng(seed)
    return [np.array([1, *rng.integers(2, 64, n)], np.int32) for n in sizes], rng.integers(2, 64, 6)


def chunk_of(model, ids, config):
    runtime = Runtime(model, config)
    runtime.prefill(ids.tolist())
    return Chunk(snapshot=runtime.snapshot(), n_lead=LEAD)


def blended(model, ids, suffix, spec, config=CONFIG):
    runtime = Runtime(model, config)
    chunks = [chunk_of(model, x, config) for x in ids]
    return runtime, blend(runtime._cache, chunks, suffix.tolist(), spec, 0)


def cached(runtime, layer):
    """Keys and values of sequence 0 by position, from the device's arrays."""
    from kvrt.cells import owned
    from kvrt.store.kv import read_kv

    cells = runtime.group_cells[0]
    mine = np.flatnonzero(owned(cells, 0))
    slots = mine[np.argsort(cells.pos[mine])].astype(np.int32)
    return [np.asarray(x) for x in read_kv(runtime.cache.stores[0], layer, slots)]


def close(got, expected):
    """Equal up to float32, whose rounding the toy's sharp softmax makes larger."""
    apart = np.abs(np.asarray(got) - expected).max() / np.abs(expected).max()
    assert apart < 3e-4, apart


@pytest.mark.parametrize("rope", ["write", "read"])
@pytest.mark.parametrize("rule", ["values", "keys", "first"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_blend_is_what_the_paper_computes(ratio, rule, rope):
    model = ToyLm(n_layers=N_LAYERS)
    ids, suffix = texts()
    spec = BlendSpec(ratio=ratio, rule=rule)
    config = dataclasses.replace(CONFIG, rope=rope)
    runtime, found = blended(model, ids, suffix, spec, config)
    logits, kept, apart, rows = Dense(model).blend(ids, suffix, spec)
    assert found.computed.tolist() == rows.tolist() and found.n_reused == 22 + 17 + 19
    close(found.logits[0], logits)
    for layer, (k, v) in enumerate(kept):
        got_k, got_v = cached(runtime, layer)
        expected = k if rope == "read" else rotated(k, np.arange(len(k)))
        close(got_k, expected)
        close(got_v, v)
    assert runtime.n_exact(0) <= len(ids[0])

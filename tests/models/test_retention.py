"""Gated retention: one token after another, many at once, and all pairs of tokens in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plainretention import BASE, retention, rotated

from kvrt_models.layers import retention as layers
from kvrt_models.layers.delta.chunk import CHUNK
from kvrt_models.layers.retention import retention_chunk, retention_step
from kvrt_models.layers.tensors import tensors_of
from tests import retentiontoy

H, K, V = 2, 8, 6
TOLERANCE = 1e-5
STEP, RUN = jax.jit(retention_step), jax.jit(retention_chunk)
# Logarithms of decays: as models have them, none, nearly all, and all now and then.
DECAYS = {
    "usual": lambda rng, shape: -np.log1p(np.exp(rng.normal(0, 2, shape))) / 16,
    "none": lambda rng, shape: np.zeros(shape),
    "near zero": lambda rng, shape: -rng.uniform(20, 90, shape),
    "zero": lambda rng, shape: np.where(rng.random(shape) < 0.2, -np.inf, -0.05),
}


def drawn(n, decay, seed=0):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((n, H, K)) * K**-0.5 for _ in range(2))
    v, g = rng.standard_normal((n, H, V)), DECAYS[decay](rng, (n, H))
    q, k = (rotated(x, np.arange(n)) for x in (q, k))
    return [x.astype(np.float32) for x in (q, k, v, g)]


def by_steps(q, k, v, g):
    s, out = jnp.zeros((H, K, V)), []
    for t in range(len(q)):
        s, o = STEP(s, (q[t], k[t], v[t]), g[t])
        out.append(o)
    return np.array(s), np.array(out)


def by_chunks(q, k, v, g, size):
    """Chunks of a size, the last one filled up with what must not count."""
    s, out, n = jnp.zeros((H, K, V)), [], len(q)

    def padded(x):
        return np.concatenate([x, np.full((-n % size, *x.shape[1:]), 0.7, x.dtype)])

    q, k, v, g = map(padded, (q, k, v, g))
    for i in range(0, n, size):
        at = slice(i, i + size)
        s, o = RUN(s, (q[at], k[at], v[at]), g[at], jnp.int32(min(size, n - i)))
        out.append(o)
    return np.array(s), np.concatenate(out)[:n]


@pytest.mark.parametrize("decay", DECAYS)
def test_three_forms_agree(decay):
    tokens = drawn(150, decay)
    naive, steps, chunks = retention(*tokens), by_steps(*tokens), by_chunks(*tokens, CHUNK)
    worst = [np.abs(steps[1] - naive).max(), np.abs(chunks[1] - naive).max()]
    worst.append(max(np.abs(a - b).max() for a, b in zip(steps, chunks, strict=True)))
    print(decay, *(f"{x:.1e}" for x in worst))
    assert max(worst) < TOLERANCE
    assert np.abs(naive).max() > 0.1


def test_a_chunk_of_no_tokens_changes_nothing():
    q, k, v, g = drawn(9, "usual")
    s = by_steps(q, k, v, g)[0]
    after = RUN(s, (q, np.full_like(k, np.nan), v), g, jnp.int32(0))[0]
    np.testing.assert_allclose(after, s, atol=1e-6)


def test_both_rotate_alike():
    x = np.random.default_rng(1).standard_normal((9, H, K)).astype(np.float32)
    pos = np.arange(9) + 1000.0
    found = layers.rotated(jnp.asarray(x), jnp.asarray(pos, jnp.float32), BASE)
    np.testing.assert_allclose(found, rotated(x, pos), atol=1e-3)


def test_a_folder_has_four_projections_that_stand_one_below_the_other():
    rows = tensors_of(retentiontoy.decoder().spec)
    row = rows["blk.0.ssm_in.weight"]
    assert row.hf == [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvg"]
    parts = [np.full((row.shape[0] // 4, row.shape[1]), i) for i in range(4)]
    np.testing.assert_array_equal(row.make(parts, row.shape), np.concatenate(parts))
    assert rows["blk.0.ssm_gt.weight"].hf == ["model.layers.0.self_attn.gt_proj.weight"]

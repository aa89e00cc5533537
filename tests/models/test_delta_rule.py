"""The gated delta rule: one token after another, many at once, and in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plaindelta import delta

from kvrt_models.layers.delta.chunk import CHUNK, CHUNK_BY_CHANNEL, delta_chunk
from kvrt_models.layers.delta.step import delta_step

H, K, V = 3, 16, 8
TOLERANCE = 1e-5
STEP, RUN = jax.jit(delta_step), jax.jit(delta_chunk)
# Logarithms of decays: as models have them, hardly any, nearly all, all now and then.
DECAYS = {
    "usual": lambda rng, shape: -np.exp(rng.uniform(-4, 1, shape)),
    "none": lambda rng, shape: np.zeros(shape),
    "near one": lambda rng, shape: -np.exp(rng.uniform(-16, -8, shape)),
    "near zero": lambda rng, shape: -rng.uniform(20, 90, shape),
    "both": lambda rng, shape: np.where(rng.random(shape) < 0.1, -1e4, -1e-4),
    "zero": lambda rng, shape: np.where(rng.random(shape) < 0.2, -np.inf, -0.05),
}


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def drawn(n, decay="usual", by_channel=False, alike=0.0, seed=0):
    """A state and n tokens; keys of length one, which may be much alike."""
    rng = np.random.default_rng(seed)
    s = rng.standard_normal((H, K, V))
    q, k = unit(rng.standard_normal((n, H, K))), rng.standard_normal((n, H, K))
    k = unit((1 - alike) * k + alike * rng.standard_normal((1, H, K)))
    v, beta = rng.standard_normal((n, H, V)), rng.uniform(0, 1, (n, H))
    g = DECAYS[decay](rng, (n, H, K) if by_channel else (n, H))
    return [x.astype(np.float32) for x in (s, q, k, v, g, beta)]


def by_steps(s, q, k, v, g, beta):
    out = []
    for t in range(len(q)):
        s, o = STEP(s, (q[t], k[t], v[t]), g[t], beta[t])
        out.append(o)
    return s, np.array(out)


def by_chunks(s, q, k, v, g, beta, size):
    """Chunks of a size; the last one is filled up with what must not count."""
    out, n = [], len(q)
    rest = -n % size

    def padded(x):
        return np.concatenate([x, np.full((rest, *x.shape[1:]), 0.7, x.dtype)])

    q, k, v, g, beta = map(padded, (q, k, v, -np.abs(g), beta))
    for i in range(0, n, size):
        at = slice(i, i + size)
        s, o = RUN(s, (q[at], k[at], v[at]), g[at], beta[at], jnp.int32(min(size, n - i)))
        assert np.isfinite(o).all()
        out.append(o)
    return s, np.concatenate(out)[:n]


def worst(a, b):
    return max(float(np.abs(np.asarray(x) - y).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
@pytest.mark.parametrize("decay", DECAYS)
def test_both_forms_are_the_rule(decay, by_channel):
    tokens = drawn(150, decay, by_channel)
    expected = delta(*tokens)
    size = CHUNK_BY_CHANNEL if by_channel else CHUNK
    steps, chunks = by_steps(*tokens), by_chunks(*tokens, size)
    found = worst(steps, expected), worst(chunks, expected), worst(chunks, map(np.asarray, steps))
    print(f"{decay}, by_channel={by_channel}: steps, chunks, both", *(f"{x:.1e}" for x in found))
    assert max(found) < TOLERANCE


@pytest.mark.parametrize("size", [1, 5, 16, 64])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65])
def test_lengths_and_sizes_of_chunks_make_no_difference(n, size):
    tokens = drawn(n, seed=n)
    assert worst(by_chunks(*tokens, size), delta(*tokens)) < TOLERANCE


@pytest.mark.parametrize("alike", [0.9, 1.0])
def test_keys_that_are_alike_lose_nothing(alike):
    # Powers of the system would be as large as 2 to the 60th here, and cancel each other.
    tokens = drawn(128, "near one", alike=alike)
    tokens[-1][:] = 1.0
    assert worst(by_chunks(*tokens, CHUNK), delta(*tokens)) < TOLERANCE


def test_no_tokens_leave_the_state_as_it_is():
    s, q, k, v, g, beta = drawn(16)
    after, _ = RUN(s, (q, k, v), g, beta, jnp.int32(0))
    np.testing.assert_array_equal(after, s)


def test_decays_of_a_head_are_those_of_all_its_channels():
    s, q, k, v, g, beta = drawn(16)
    wide = np.repeat(g[..., None], K, axis=2)
    of_head = RUN(s, (q, k, v), g, beta, jnp.int32(16))
    assert worst(RUN(s, (q, k, v), wide, beta, jnp.int32(16)), map(np.asarray, of_head)) < 1e-6


def test_what_does_not_count_may_be_damaged():
    s, q, k, v, g, beta = drawn(16)
    wanted = RUN(s, (q, k, v), g, beta, jnp.int32(9))
    for x in (q, k, v, g, beta):
        x[9:] = np.nan
    found = RUN(s, (q, k, v), g, beta, jnp.int32(9))
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1][:9], wanted[1][:9])

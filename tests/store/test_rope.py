"""Frequencies against formulas written apart in NumPy, rotations against complex arithmetic."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt.config import RopeSpec
from kvrt.errors import BadConfig
from kvrt.store import rope

LAYOUTS = ["norm", "neox"]
TOLERANCE = {"float32": 3e-5, "bfloat16": 2e-2, "float16": 2e-3}
LLAMA3 = RopeSpec(
    n_rot=64, base=5e5, scaling="llama3", factor=8.0, n_ctx_orig=8192, low_freq_factor=1.0
)
YARN = RopeSpec(n_rot=64, base=1e4, scaling="yarn", factor=4.0, n_ctx_orig=2048)
SHORT = tuple(1.0 + 0.02 * i for i in range(8))
LONG = tuple(1.5 + 1.5 * i for i in range(8))
LONGROPE = RopeSpec(
    n_rot=16, scaling="longrope", factor=32.0, n_ctx_orig=4096, short_factors=SHORT,
    long_factors=LONG,
)  # fmt: skip


def plain(n_rot, base):
    return np.array([base ** (-2.0 * i / n_rot) for i in range(n_rot // 2)])


def pairs(d_head, n_rot, layout):
    """First and second channel of each pair."""
    half = n_rot // 2
    first = np.arange(half) * 2 if layout == "norm" else np.arange(half)
    return first, first + (1 if layout == "norm" else half)


def turned(x, theta, layout):
    """Oracle in float64: x [T, H, D] as complex numbers times exp(i theta), theta [T, R]."""
    a, b = pairs(x.shape[-1], 2 * theta.shape[-1], layout)
    out = np.asarray(x, np.float64).copy()
    z = (out[..., a] + 1j * out[..., b]) * np.exp(1j * theta)[:, None, :]
    out[..., a], out[..., b] = z.real, z.imag
    return out


def rows(n, h, d, dtype="float32", seed=0):
    x = np.random.default_rng(seed).standard_normal((n, h, d)).astype(np.float32)
    return x.astype(jnp.dtype(dtype))


def as_f32(x):
    return np.asarray(x).astype(np.float32)


def turn(x, spec, pos, layout):
    return rotated(x, rope.frequencies(spec, 4096), np.asarray(pos, np.int32), layout)


@functools.partial(jax.jit, static_argnums=3)
def rotated(x, freqs, pos, layout):
    return rope.rotate(x, *rope.angles(freqs, pos), layout)


angles = jax.jit(rope.angles)


# Frequencies


@pytest.mark.parametrize("n_rot", [2, 16, 64, 96, 128])
def test_frequencies_without_scaling(n_rot):
    got = rope.frequencies(RopeSpec(n_rot=n_rot, base=1e6), 128)
    assert got.dtype == np.float32 and got.shape == (n_rot // 2,)
    np.testing.assert_allclose(got, plain(n_rot, 1e6), rtol=1e-7)


def test_linear_divides_all_frequencies():
    spec = RopeSpec(n_rot=32, scaling="linear", factor=4.0)
    np.testing.assert_allclose(rope.frequencies(spec, 128), plain(32, 1e4) / 4, rtol=1e-7)


def test_ntk_stretches_the_slowest_pair_by_the_factor_and_not_the_fastest():
    got = rope.frequencies(RopeSpec(n_rot=32, scaling="ntk", factor=4.0), 128)
    np.testing.assert_allclose(got, plain(32, 1e4 * 4.0 ** (32 / 30)), rtol=1e-7)
    np.testing.assert_allclose(got[[0, -1]], [1.0, plain(32, 1e4)[-1] / 4], rtol=1e-6)


def test_dynamic_ntk_takes_the_base_of_the_whole_context():
    spec = RopeSpec(n_rot=32, scaling="dynamic_ntk", factor=2.0, n_ctx_orig=1024)
    base = 1e4 * (2.0 * 4096 / 1024 - 1.0) ** (32 / 30)
    np.testing.assert_allclose(rope.frequencies(spec, 4096), plain(32, base), rtol=1e-7)
    for n_ctx in (1, 1000, 1024):
        np.testing.assert_allclose(rope.frequencies(spec, n_ctx), plain(32, 1e4), rtol=1e-7)


def test_llama3_keeps_fast_pairs_divides_slow_ones_and_blends_between():
    wanted = []
    for f in plain(64, 5e5):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4.0:
            wanted.append(f)
        elif wavelength > 8192 / 1.0:
            wanted.append(f / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            wanted.append((1 - smooth) * f / 8.0 + smooth * f)
    got = rope.frequencies(LLAMA3, 131072)
    np.testing.assert_allclose(got, wanted, rtol=1e-7)
    ratio = plain(64, 5e5) / got
    assert ratio[0] == 1 and round(ratio[-1], 4) == 8
    assert np.any((ratio > 1.01) & (ratio < 7.9)), "the case must reach the blend"


def test_yarn_ramps_between_the_pairs_of_beta_fast_and_beta_slow():
    freqs = plain(64, 1e4)
    # Pair i makes 2048 f / (2 pi) turns; 32 turns are passed between pairs 8 and 9, one turn
    # between pairs 20 and 21, so the ramp runs from 8 to 21.
    turns = 2048 * freqs / (2 * math.pi)
    low, high = int(np.sum(turns >= 32)) - 1, int(np.sum(turns >= 1))
    assert (low, high) == (8, 21)
    wanted = []
    for i, f in enumerate(freqs):
        stretch = min(max((i - low) / (high - low), 0.0), 1.0)
        wanted.append(f * (1 - stretch) + f / 4.0 * stretch)
    np.testing.assert_allclose(rope.frequencies(YARN, 8192), wanted, rtol=1e-7)


def test_yarn_without_a_ramp_steps_from_kept_to_divided():
    spec = dataclasses.replace(YARN, n_rot=16, n_ctx_orig=4, beta_fast=0.6, beta_slow=0.55)
    ratio = plain(16, 1e4) / rope.frequencies(spec, 64)
    np.testing.assert_allclose(ratio, [1.0] + [4.0] * 7, rtol=1e-6)


def test_yarn_ends_its_ramp_at_the_last_channel():
    # Without the limit at n_rot - 1 = 7 the ramp would run from pair 2 to 9.
    spec = RopeSpec(
        n_rot=8, base=100.0, scaling="yarn", factor=4.0, n_ctx_orig=100_000, beta_fast=1000.0
    )
    wanted = plain(8, 100.0) * [1.0, 1.0, 1.0, 0.8 + 0.2 / 4.0]
    np.testing.assert_allclose(rope.frequencies(spec, 400_000), wanted, rtol=1e-7)


@pytest.mark.parametrize(("n_ctx", "factors"), [(512, SHORT), (4096, SHORT), (4097, LONG)])
def test_longrope_picks_factors_by_the_context(n_ctx, factors):
    wanted = plain(16, 1e4) / np.array(factors)
    np.testing.assert_allclose(rope.frequencies(LONGROPE, n_ctx), wanted, rtol=1e-7)


@pytest.mark.parametrize(
    "spec", [RopeSpec(n_rot=16), LONGROPE, dataclasses.replace(YARN, n_rot=16)]
)
def test_freq_factors_divide_in_any_rule(spec):
    factors = tuple(1.0 + i for i in range(8))
    with_factors = rope.frequencies(dataclasses.replace(spec, freq_factors=factors), 4096)
    np.testing.assert_allclose(with_factors * factors, rope.frequencies(spec, 4096), rtol=3e-7)


def test_one_pair_is_the_fastest_and_never_stretched_by_ntk():
    for scaling in ("ntk", "dynamic_ntk"):
        spec = RopeSpec(n_rot=2, scaling=scaling, factor=4.0, n_ctx_orig=8)
        assert rope.frequencies(spec, 4096).tolist() == [1.0]


@pytest.mark.parametrize(
    ("spec", "n_ctx", "wanted"),
    [
        (RopeSpec(n_rot=16, scaling="linear", factor=4.0), 4096, 1.0),
        (LLAMA3, 131072, 1.0),
        (YARN, 8192, 0.1 * math.log(4.0) + 1.0),
        (dataclasses.replace(YARN, factor=1.0), 8192, 1.0),
        (dataclasses.replace(YARN, magnitude=1.0), 8192, 1.0),
        (LONGROPE, 131072, math.sqrt(1 + math.log(32) / math.log(4096))),
        (LONGROPE, 512, math.sqrt(1 + math.log(32) / math.log(4096))),
        (dataclasses.replace(LONGROPE, factor=1.0), 512, 1.0),
        (dataclasses.replace(LONGROPE, magnitude=1.25), 512, 1.25),
    ],
)
def test_magnitude(spec, n_ctx, wanted):
    assert rope.magnitude(spec, n_ctx) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (dataclasses.replace(LLAMA3, high_freq_factor=1.0), "must be above low_freq_factor"),
        (dataclasses.replace(YARN, base=1.0), "base above 1"),
    ],
)
def test_rules_refuse_what_they_cannot_compute(spec, words):
    with pytest.raises(BadConfig, match=words):
        rope.frequencies(spec, 64)


def test_longrope_magnitude_refuses_a_trained_length_of_one():
    with pytest.raises(BadConfig, match="n_ctx_orig of 2 or more"):
        rope.magnitude(dataclasses.replace(LONGROPE, n_ctx_orig=1), 64)


def test_an_unknown_rule_or_layout_is_named():
    spec = RopeSpec(n_rot=16)
    object.__setattr__(spec, "scaling", "cubic")  # past the annotations that tests check
    with pytest.raises(BadConfig, match="'cubic' is unknown"):
        rope.frequencies(spec, 64)
    with pytest.raises(BadConfig, match="layout is 'gptj'; 'norm' or 'neox'"):
        turn(rows(2, 1, 16), RopeSpec(n_rot=16), [0, 1], "gptj")


# Rotations


def test_angles_are_float32_products():
    freqs = rope.frequencies(RopeSpec(n_rot=32), 64)
    pos = np.array([0, 1, -1, 777, 65535, 2**24 + 1, 2**31 - 1], np.int32)
    cos, sin = angles(freqs, pos)
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == (7, 16)
    theta = (pos.astype(np.float32)[:, None] * freqs[None, :]).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(theta), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(theta), atol=1e-6)


def test_angles_err_by_no_more_than_the_float32_product():
    freqs = rope.frequencies(RopeSpec(n_rot=32), 64)
    pos = np.arange(0, 2**20, 4099, dtype=np.int32)
    cos, sin = angles(freqs, pos)
    theta = pos[:, None] * freqs[None, :].astype(np.float64)
    error = np.abs(np.asarray(cos) + 1j * np.asarray(sin) - np.exp(1j * theta))
    assert np.all(error <= theta * 2.0**-23 + 1e-6)
    assert error.max() > 1e-3, "the bound must be met by angles that do lose bits"


# Other tests rotate arrays of the same shapes and types, by the same programs.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("n_rot", "dtype"), [(2, "float32"), (16, "float32"), *((12, dtype) for dtype in TOLERANCE)]
)
def test_rotate_against_complex_numbers(layout, n_rot, dtype):
    x, pos = rows(5, 3, 16, dtype), np.array([0, 1, 2, 100, 1000])
    spec = RopeSpec(n_rot=n_rot, layout=layout)
    got = turn(x, spec, pos, layout)
    assert got.dtype == x.dtype
    theta = pos[:, None] * rope.frequencies(spec, 64)[None, :].astype(np.float64)
    wanted = turned(as_f32(x), theta, layout)
    error = TOLERANCE[dtype]
    np.testing.assert_allclose(as_f32(got), wanted, rtol=error, atol=error)


def test_the_layouts_differ_and_norm_is_neox_of_permuted_channels():
    x, pos = rows(5, 3, 16), [3, 50, 7, 9, 2]
    a, b = pairs(16, 16, "norm")
    order = np.concatenate([a, b])
    neox = turn(x[..., order], RopeSpec(n_rot=16), pos, "neox")
    norm = np.asarray(turn(x, RopeSpec(n_rot=16), pos, "norm"))
    np.testing.assert_array_equal(norm[..., order], neox)
    assert not np.allclose(norm, turn(x, RopeSpec(n_rot=16), pos, "neox"), atol=0.1)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_rotation_leaves_the_tail_bit_identical(layout, dtype):
    x = rows(5, 3, 16, dtype)
    x[0, 0, 12:15] = [np.nan, -0.0, np.inf]
    got = np.asarray(turn(x, RopeSpec(n_rot=12), [5, 6, 7, 8, 1000], layout))
    tails = [y[..., 12:].tobytes() for y in (got, x)]
    assert tails[0] == tails[1]
    assert not np.array_equal(got[..., :12], x[..., :12])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_turning_by_nothing_leaves_finite_values_equal(layout, dtype):
    # Equal, not always the same bits: -0.0 may come back as 0.0, and an infinity makes its
    # partner nan (inf * 0). A K-shift must therefore leave cells with delta 0 out by itself.
    spec = RopeSpec(n_rot=12)
    for seed in range(20):
        x = rows(5, 3, 16, dtype, seed)
        got = turn(x, spec, np.zeros(5), layout)
        assert np.asarray(got).tobytes() == x.tobytes()
    zero = np.full_like(x, -0.0)
    zero[0, 0, 1] = -1.0
    back = as_f32(turn(zero, spec, np.zeros(5), layout))
    np.testing.assert_array_equal(back, as_f32(zero))
    assert not np.all(np.signbit(back[..., :12]))


@settings(deadline=None, max_examples=40)
@given(
    p=st.integers(0, 4000), delta=st.integers(-4000, 4000), layout=st.sampled_from(LAYOUTS)
)  # fmt: skip
def test_rotations_compose(p, delta, layout):
    x, spec = rows(5, 3, 16), RopeSpec(n_rot=16)
    moved = turn(turn(x, spec, [p] * 5, layout), spec, [delta] * 5, layout)
    np.testing.assert_allclose(moved, turn(x, spec, [p + delta] * 5, layout), atol=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_on_the_distance_alone(layout):
    spec, q, k = RopeSpec(n_rot=16, base=100.0), rows(5, 3, 16), rows(5, 3, 16, seed=1)

    def score(p, c):
        turned = (np.asarray(turn(x, spec, [i] * 5, layout)) for x, i in ((q, p), (k, c)))
        return float(np.dot(*(x[0, 0] for x in turned)))

    assert score(90, 70) == pytest.approx(score(20, 0), abs=1e-4)
    assert abs(score(90, 70) - score(90, 71)) > 1e-2


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotate_block_is_rotate_with_channels_before_cells(layout, dtype):
    x, pos = rows(8, 3, 20, dtype), np.array([0, 5, 1, 9, 300, 2, 7, 7], np.int32)
    freqs = jax.device_put(rope.frequencies(RopeSpec(n_rot=12), 64))

    @jax.jit
    def both(x):
        cos, sin = rope.angles(freqs, pos)
        got = rope.rotate_block(jnp.transpose(x, (1, 2, 0)), cos.T, sin.T, layout)
        return jnp.transpose(got, (2, 0, 1)), rope.rotate(x, cos, sin, layout)

    got, wanted = both(x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shift_without_magnitude_keeps_the_norm_of_keys(layout):
    spec = dataclasses.replace(YARN, n_rot=16, n_ctx_orig=64, factor=8.0)
    freqs = jax.device_put(rope.frequencies(spec, 512))
    scale = np.float32(rope.magnitude(spec, 512))

    @jax.jit
    def turned_by(key, delta, scale):
        return rope.rotate(key, *(scale * x for x in rope.angles(freqs, delta)), layout)

    key = turned_by(rows(1, 1, 16), np.array([100], np.int32), scale)
    norm = np.linalg.norm(key)
    for delta in [-7, 20, -113]:
        key = turned_by(key, np.array([delta], np.int32), np.float32(1))
    assert np.linalg.norm(key) == pytest.approx(norm, rel=1e-5)
    np.testing.assert_allclose(key, rows(1, 1, 16) * scale, atol=1e-4)


def test_rotation_runs_in_vmap():
    x, pos = rows(5, 3, 16), np.arange(5, dtype=np.int32)
    spec = RopeSpec(n_rot=16)
    freqs = jax.device_put(rope.frequencies(spec, 4096))

    def f(x, pos):
        return rope.rotate(x, *rope.angles(freqs, pos), "neox")

    xs, at = np.stack([x, x]), np.stack([pos + 1, pos])
    plain = turn(x, spec, pos, "neox")
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(xs, at)[1], plain, atol=1e-6)


# Against Hugging Face transformers: tests/golden/rope_hf.json, by scripts/golden/write_hf.py

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rope_hf.json").read_text())
NAMES = {"dynamic": "dynamic_ntk"}


def golden_spec(case):
    rule = case["rule"]
    return RopeSpec(
        n_rot=case["head_dim"],
        base=rule["rope_theta"],
        scaling=NAMES.get(rule["rope_type"], rule["rope_type"]),
        factor=rule["factor"],
        n_ctx_orig=rule.get("original_max_position_embeddings", case["max_position_embeddings"]),
        low_freq_factor=rule.get("low_freq_factor", 1.0),
        high_freq_factor=rule.get("high_freq_factor", 4.0),
        short_factors=tuple(rule.get("short_factor", ())),
        long_factors=tuple(rule.get("long_factor", ())),
        beta_fast=rule.get("beta_fast", 32.0),
        beta_slow=rule.get("beta_slow", 1.0),
        truncate=rule.get("truncate", True),
    )


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda c: f"{c['rule']['rope_type']}-{c['n_ctx']}"
)
def test_rules_agree_with_transformers(case):
    # transformers computes in float32, so the last bits are its own.
    spec, n_ctx = golden_spec(case), case["n_ctx"]
    np.testing.assert_allclose(rope.frequencies(spec, n_ctx), case["frequencies"], rtol=2e-6)
    assert rope.magnitude(spec, n_ctx) == pytest.approx(case["attention_factor"], rel=1e-9)

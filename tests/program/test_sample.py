"""Sampling against the definitions, written with a sort in NumPy."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt import Sampling
from kvrt.errors import BadConfig
from kvrt.program import sample

V = 50
draw, kept = jax.jit(sample.sample_tokens), jax.jit(sample.kept)


def few(logits):
    """One row of logits, as wide as the others, so that programs are those of other tests."""
    return np.pad(np.float32([logits]), ((0, 0), (0, V - len(logits))), constant_values=-1e9)


def expected_kept(logits, sampling):
    """top-k, then top-p of what is left, then min-p of what top-k left."""
    order = np.argsort(-logits, kind="stable")
    k = sampling.top_k or len(logits)
    keep = np.zeros(len(logits), bool)
    keep[order[:k]] = True
    p = np.where(keep, np.exp((logits - logits.max()).astype(np.float64)), 0)
    p /= p.sum()
    mass = np.cumsum(p[order])
    if sampling.top_p < 1:
        n = int(np.searchsorted(mass, sampling.top_p - 1e-9)) + 1
        inside = np.zeros(len(logits), bool)
        inside[order[:n]] = True
        keep &= inside
    return keep & (p >= sampling.min_p * p.max())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    top_k=st.integers(0, V),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_limits_keep_what_the_definitions_keep(seed, top_k, top_p, min_p):
    logits = 3 * np.random.default_rng(seed).standard_normal(V).astype(np.float32)
    sampling = Sampling(temp=1, top_k=top_k, top_p=top_p, min_p=min_p)
    sampler = sample.create(sampling, [[]])
    found = np.asarray(kept(logits[None], sampler))[0]
    np.testing.assert_array_equal(found, expected_kept(logits, sampling))


def test_equal_logits_at_the_edge_stay_together():
    logits = few([1.0, 2.0, 2.0, 2.0, 0.0])
    found = kept(logits, sample.create(Sampling(temp=1, top_k=2), [[]]))
    assert np.flatnonzero(found).tolist() == [1, 2, 3]


def test_zero_temperature_is_greedy():
    logits = np.random.default_rng(0).standard_normal((4, V)).astype(np.float32)
    tokens, _ = draw(logits, sample.create_many([Sampling()] * 4, 4))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))


def test_frequencies_follow_the_tempered_softmax():
    logits = np.float32([0.0, 1.0, 2.0, -1.0])
    n, temp = 4000, 0.7
    sampler = sample.create(Sampling(temp=temp, seed=7), [[]] * n)
    sampler = dataclasses.replace(sampler, n_sampled=np.arange(n, dtype=np.uint32))
    tokens, _ = draw(np.tile(logits, (n, 1)), sampler)
    share = np.bincount(np.asarray(tokens), minlength=4) / n
    expected = np.exp(logits / temp) / np.exp(logits / temp).sum()
    assert np.abs(share - expected).max() < 4 * np.sqrt(0.25 / n)


def test_a_seed_repeats_and_another_differs():
    logits = np.zeros((1, V), np.float32)

    def run(seed):
        sampler, drawn = sample.create(Sampling(temp=1, seed=seed), [[]]), []
        for _ in range(12):
            token, sampler = draw(logits, sampler)
            drawn.append(int(token[0]))
        return drawn

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert len(set(run(3))) > 1


def test_random_numbers_go_on_behind_2_to_the_31_tokens():
    logits, seen = np.zeros((1, V), np.float32), []
    sampler = sample.create(Sampling(temp=1, seed=3), [[]], n_sampled=2**31 - 2)
    for _ in range(4):
        _, sampler = draw(logits, sampler)
        seen.append(int(sampler.n_sampled[0]))
    assert seen == [2**31 - 1, 2**31, 2**31 + 1, 2**31 + 2]
    again, _ = draw(logits, sample.create(Sampling(temp=1, seed=3), [[]], n_sampled=2**31 + 2))
    token, _ = draw(logits, sampler)
    assert int(again[0]) == int(token[0])
    first = sample.create(Sampling(), [[]], n_sampled=2**32 + 5)
    assert first.n_sampled.tolist() == [5]


def test_a_row_draws_what_it_draws_alone():
    samplings = [
        Sampling(),
        Sampling(temp=1, seed=5),
        Sampling(temp=0.7, top_k=3, seed=5, repeat_penalty=1.5, repeat_last_n=4),
        Sampling(temp=1.3, top_p=0.6, min_p=0.05, seed=9),
    ]
    recent = [[1, 2], [], [3, 4, 5, 6], [7]]
    logits = np.random.default_rng(2).standard_normal((4, V)).astype(np.float32)
    many = sample.create_many(samplings, 4)
    for row, tokens in zip(many.recent, recent, strict=True):
        row[4 - len(tokens) :] = tokens
    drawn = []
    for i, (sampling, tokens) in enumerate(zip(samplings, recent, strict=True)):
        token, _ = draw(logits[i : i + 1], sample.create(sampling, [tokens]))
        drawn.append(int(token[0]))
    np.testing.assert_array_equal(draw(logits, many)[0], drawn)


def test_the_penalty_counts_only_recent_tokens():
    logits = few([4.0, 3.0, -1.0, 2.5])
    sampling = Sampling(repeat_penalty=2.0, repeat_last_n=2)
    token, sampler = draw(logits, sample.create(sampling, [[3, 0]]))
    assert int(token[0]) == 1  # 4 / 2 and 2.5 / 2 fall below 3
    token, sampler = draw(logits, sampler)
    assert int(token[0]) == 3  # 0 and 1 are recent: 2, 1.5, -1, 2.5
    token, _ = draw(logits, sampler)
    assert int(token[0]) == 0  # 1 and 3 are: 4 is whole again


def test_a_negative_logit_is_multiplied():
    logits = few([-1.0, -1.5, -9.0])
    sampling = Sampling(repeat_penalty=2.0, repeat_last_n=2)
    assert int(draw(logits, sample.create(sampling, [[0]]))[0][0]) == 1


def test_log_probs_are_of_the_raw_distribution():
    logits = np.random.default_rng(1).standard_normal((2, V)).astype(np.float32)
    ids, values = jax.jit(sample.log_probs, static_argnums=1)(logits, 5)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(ids, np.argsort(-logp, axis=1, kind="stable")[:, :5])
    np.testing.assert_allclose(values, np.take_along_axis(logp, np.asarray(ids), 1), rtol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        dict(temp=-1),
        dict(temp=float("nan")),
        dict(top_k=-1),
        dict(top_p=1.5),
        dict(min_p=-0.1),
        dict(repeat_penalty=0),
        dict(repeat_last_n=-1),
        dict(seed=-1),
    ],
)
def test_values_out_of_range_are_refused(bad):
    ((name, value),) = bad.items()
    with pytest.raises(BadConfig, match=f"^{name} is {value}; it must "):
        Sampling(**bad)

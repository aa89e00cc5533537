"""Recurrent layers against Hugging Face transformers, whatever the parts a prompt is read in."""

import jax.numpy as jnp
import numpy as np
import pytest
import stand_in
from headers import GOLDEN

from kvrt import RecurrentSpec
from models.load import load

FAMILIES = ("jamba", "jamba-bias", "jamba-experts", "bamba", "bamba-bias")
TOLERANCE = 1e-4


def golden(name):
    with np.load(GOLDEN / name / "expected.npz") as data:
        return data["tokens"].tolist(), data["logits"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name):
    tokens, expected = golden(name)
    found = stand_in.logits(load(GOLDEN / name).decoder, tokens, [len(tokens)])
    worst = float(np.abs(found - expected).max())
    print(f"{name}: largest difference {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("size", [1, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_of_a_prompt_do_not_matter(name, size):
    tokens, expected = golden(name)
    parts = [size] * (len(tokens) // size) + [r for r in [len(tokens) % size] if r]
    found = stand_in.logits(load(GOLDEN / name).decoder, tokens, parts)
    worst = float(np.abs(found - expected).max())
    print(f"{name} in parts of {size}: largest difference {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_that_is_lost_is_noticed(name):
    tokens, expected = golden(name)
    decoder = load(GOLDEN / name).decoder
    found = stand_in.logits(decoder, tokens, [24, 24], forget=True)
    lost = np.abs(found - expected)[24:].max(axis=1)
    assert np.abs(found - expected)[:24].max() < TOLERANCE
    # Not the convolution alone, which sees three tokens back.
    assert lost[8:].min() > 0.05


def test_the_cache_is_told_what_to_keep():
    jamba, bamba = (load(GOLDEN / name).decoder for name in ("jamba", "bamba"))
    assert jamba.recurrent == RecurrentSpec(layers=(0, 2), shapes=((3, 64), (64, 8)))
    assert bamba.recurrent == RecurrentSpec(layers=(0, 2), shapes=((3, 96), (8, 8, 8)))
    assert [g.layers for g in (*jamba.groups, *bamba.groups)] == [(1,), (1,)]
    assert jamba.groups[0].rope is None and bamba.groups[0].rope.n_rot == 4
    assert load(GOLDEN / "llama").decoder.recurrent is None


@pytest.mark.parametrize("name", ["jamba", "bamba"])
def test_matrices_alone_are_kept_in_half_precision(name):
    tokens, expected = golden(name)
    decoder = load(GOLDEN / name, dtype="bf16").decoder
    mixer = decoder.blocks[0].mixer
    assert mixer.projection.weight[...].dtype == mixer.out.weight[...].dtype == jnp.bfloat16
    small = (mixer.conv.weight, mixer.conv.bias, mixer.decay, mixer.skip)
    assert all(x[...].dtype == jnp.float32 for x in small)
    found = stand_in.logits(decoder, tokens, [len(tokens)])
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.02 * expected.std()

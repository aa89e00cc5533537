"""Recurrent layers of real families in a `Runtime`: forks, rewinds, and states that are lost.

test_families.py has their logits by pieces of a prompt.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from headers import GOLDEN

from kvrt import CacheConfig, RecurrentSpec, Runtime
from kvrt_models.load import load

FAMILIES = ("jamba", "bamba", "qwen3-next", "kimi-linear")
TOLERANCE = 1e-4
N_PROMPT = 21
N_BACK = 4  # tokens that can be taken back


def golden(name):
    with np.load(GOLDEN / name / "expected.npz") as data:
        return data["tokens"].tolist(), data["logits"]


def runtime(decoder, **change):
    # Parts of 32 tokens and fewer: one program of steps of those, one of few tokens.
    config = {"n_ctx": 192, "block_size": 16, "n_ubatch": 32, "n_seq_max": 3, **change}
    return Runtime(decoder, CacheConfig(**config))


def is_golden(found, expected):
    worst = float(np.abs(np.asarray(found) - expected).max())
    print(f"largest difference {worst:.1e}")
    return worst < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_both_sides_of_a_fork_are_those_of_transformers(name):
    tokens, expected = golden(name)
    at = runtime(load(GOLDEN / name).decoder, n_rs_seq=N_BACK)
    at.append(tokens[:N_PROMPT])
    at.seq_cp(0, 1)
    # One side goes another way first, then both are decoded in the same steps.
    at.append(tokens[::-1], 1)
    at.seq_cp(0, 2)
    mine, other = [], []
    for right, wrong in zip(tokens[N_PROMPT:], tokens[N_PROMPT - 1 :], strict=False):
        logits = at.decode({1: wrong, 0: right})
        mine.append(logits[0])
        other.append(logits[1])
    assert is_golden(mine, expected[N_PROMPT:])
    late = at.append(tokens[N_PROMPT:], 2, out_ids=range(len(tokens) - N_PROMPT))
    assert is_golden(late, expected[N_PROMPT:])
    again = runtime(load(GOLDEN / name).decoder, n_rs_seq=N_BACK)
    whole = tokens[:N_PROMPT] + tokens[::-1] + tokens[N_PROMPT - 1 :][: len(other)]
    first = N_PROMPT + len(tokens)
    assert is_golden(other, again.append(whole, out_ids=range(first, len(whole))))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_after_a_rewind_or_a_removal_nothing_is_left_of_what_went(name):
    tokens, expected = golden(name)
    at = runtime(load(GOLDEN / name).decoder, n_rs_seq=N_BACK)
    at.append(tokens[::-1])
    at.seq_rm(0)
    at.append(tokens[:N_PROMPT])
    at.append(tokens[:N_BACK])
    assert at.resume_positions().earliest == N_PROMPT
    assert at.can_remove(0, N_PROMPT) and not at.can_remove(0, N_PROMPT - 1)
    at.seq_rm(0, N_PROMPT)
    rest = range(len(tokens) - N_PROMPT)
    probed = at.probe(tokens[N_PROMPT:])
    assert is_golden(probed, expected[N_PROMPT:])
    assert is_golden(at.append(tokens[N_PROMPT:], out_ids=rest), expected[N_PROMPT:])


class Forgetful(nnx.Module):
    """A decoder whose recurrences see the convolution's window, but never their state."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.groups, self.recurrent = decoder.groups, decoder.recurrent
        self.n_vocab = decoder.n_vocab

    def __call__(self, tokens, attend, out_ids):
        return self.decoder(tokens, Forgetting(attend), out_ids)


@dataclasses.dataclass(frozen=True)
class Forgetting:
    """Hands everything on but the state."""

    attend: object

    def __call__(self, *args, **kwargs):
        return self.attend(*args, **kwargs)

    def recur(self, layer, step, inputs, chunk=None):
        def forgetting(state, row):
            return step((state[0], jnp.zeros_like(state[1])), row)

        return self.attend.recur(layer, forgetting, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES[:3])
def test_a_state_that_is_lost_is_noticed(name):
    tokens, expected = golden(name)
    at = runtime(Forgetful(load(GOLDEN / name).decoder))
    found = np.asarray(at.append(tokens, out_ids=range(len(tokens))))
    lost = np.abs(found - expected).max(axis=1)
    assert lost[0] < TOLERANCE
    assert lost[1:].min() > 0.05


def test_the_cache_is_told_what_to_keep():
    jamba, bamba = (load(GOLDEN / name).decoder for name in ("jamba", "bamba"))
    assert jamba.recurrent == RecurrentSpec(layers=(0, 2), shapes=((3, 64), (64, 8)))
    assert bamba.recurrent == RecurrentSpec(layers=(0, 2), shapes=((3, 96), (8, 8, 8)))
    assert [g.layers for g in (*jamba.groups, *bamba.groups)] == [(1,), (1,)]
    assert jamba.groups[0].rope is None and bamba.groups[0].rope.n_rot == 4
    assert load(GOLDEN / "llama").decoder.recurrent is None


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_matrices_alone_are_kept_in_half_precision(name):
    tokens, expected = golden(name)
    decoder = load(GOLDEN / name, dtype="bf16").decoder
    mixer = decoder.blocks[0].mixer
    assert mixer.projection.weight[...].dtype == mixer.out.weight[...].dtype == jnp.bfloat16
    small = [mixer.conv.weight, mixer.decay]
    of_delta = name in ("qwen3-next", "kimi-linear")
    small += [mixer.dt_bias] if of_delta else [mixer.conv.bias, mixer.skip]
    assert all(x[...].dtype == jnp.float32 for x in small)
    found = runtime(decoder).append(tokens, out_ids=range(len(tokens)))
    # Rounded scores may choose other experts.
    limit = 0.05 if name == "kimi-linear" else 0.02
    assert np.sqrt(np.mean((np.asarray(found) - expected) ** 2)) < limit * expected.std()

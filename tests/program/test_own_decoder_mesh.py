"""A user's decoder on a mesh: divided as it says, whole with a word where it says nothing."""

import functools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvrt import CacheConfig, Decoder, GroupSpec, MeshSpec, RopeSpec, Runtime, ShardedDecoder
from kvrt.errors import BadConfig

ROOT = Path(__file__).parents[2]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
DIVIDED = {
    ("into", "kernel"): jax.P(None, "tensor"),
    ("back", "kernel"): jax.P("tensor"),
    ("embedding",): jax.P("tensor"),
}


class Silent(nnx.Module):
    """One layer of attention in the words of nnx; names are none that kvrt's decoder has."""

    recurrent, n_vocab, n_heads, head_dim = None, 32, 4, 8

    def __init__(self):
        width, rngs = self.n_heads * self.head_dim, nnx.Rngs(0)
        spec = GroupSpec(layers=(0,), n_kv_heads=4, head_dim=8, rope=RopeSpec(n_rot=8))
        self.groups = (spec,)
        draw = np.random.default_rng(0).standard_normal((self.n_vocab, width), np.float32)
        self.embedding = nnx.Param(jnp.asarray(draw))
        self.into = nnx.Linear(width, 3 * width, rngs=rngs)
        self.back = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, tokens, attend, out_ids):
        x = self.embedding[...][tokens]
        heads = x @ self.into.kernel[...] + self.into.bias[...][None]
        heads = heads.reshape(x.shape[0], 3 * self.n_heads, -1)
        out = attend(0, *jnp.split(heads, 3, axis=1)).reshape(x.shape)
        x = x + out @ self.back.kernel[...] + self.back.bias[...][None]
        return x[out_ids] @ self.embedding[...].T


class Own(Silent):
    said = DIVIDED

    def shardings(self):
        return self.said


def logits(model, mesh=None):
    config = CacheConfig(n_ctx=16, block_size=4, n_ubatch=8)
    runtime = Runtime(model, config, mesh=mesh)
    return np.asarray(runtime.append(TOKENS)), runtime.programs.params


def found_on(n_devices, model):
    """What a mesh of n devices gives: differences, parts of parameters and what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got, params = logits(model, MeshSpec(tensor=n_devices))
    want = logits(type(model)())[0]
    return {
        "differs": float(np.abs(got - want).max() / np.abs(want).max()),
        "parts": [x.size // x.addressable_shards[0].data.size for x in params],
        "said": [str(x.message) for x in said],
    }


@functools.cache
def findings():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.program.test_own_decoder_mesh"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_an_own_decoder_is_divided_as_it_says_and_gives_the_logits_of_one_device(n):
    found = findings()[f"own {n}"]
    # Leaves in order: back's bias and kernel, embedding, into's bias and kernel.
    assert found["parts"] == [1, n, n, 1, n]
    assert found["differs"] < 4e-6
    assert found["said"] == []


@pytest.mark.slow
def test_a_decoder_that_says_nothing_is_whole_and_told_of():
    found = findings()["silent 2"]
    assert found["parts"] == [1, 1, 1, 1, 1]
    assert found["differs"] < 4e-6
    (line,) = found["said"]
    assert line.startswith(
        "Silent has no shardings(): each of 2 devices keeps all its 5 parameters"
    )
    assert "(0.0 MB)" in line and "kvrt.ShardedDecoder" in line and "\n" not in line


@pytest.mark.slow
def test_a_parameter_that_does_not_divide_is_whole_and_told_of():
    found = findings()["odd 4"]
    assert found["parts"] == [1, 4, 1, 1, 4]
    assert found["differs"] < 4e-6
    (line,) = found["said"]
    assert line.startswith(
        "the mesh does not divide 1 of the parameters that Odd.shardings() names"
    )
    assert "the first ('embedding',) of shape (31, 32): each device keeps them whole" in line


def test_the_contract_knows_who_says_something():
    assert isinstance(Own(), ShardedDecoder) and isinstance(Own(), Decoder)
    assert isinstance(Silent(), Decoder) and not isinstance(Silent(), ShardedDecoder)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({("into", "weight"): jax.P()}, "names ('into', 'weight'), which is no parameter; one of"),
        ({("embedding",): jax.P("heads")}, "divides ('embedding',) by ('heads',); it has 2 axes"),
        (
            {("into", "bias"): jax.P(None, "tensor")},
            "it has 1 axes, and a mesh has the axes context",
        ),
    ],
)
def test_what_no_mesh_can_do_is_refused_in_a_line(said, told):
    model = Own()
    model.said = said
    with pytest.raises(BadConfig, match=re.escape(told)) as caught:
        Runtime(model, CacheConfig(n_ctx=16), mesh=MeshSpec())
    assert "\n" not in str(caught.value)


class Odd(Own):
    n_vocab = 31


def main():
    models = {"own 2": Own, "own 4": Own, "silent 2": Silent, "odd 4": Odd}
    print(json.dumps({name: found_on(int(name[-1]), of()) for name, of in models.items()}))


if __name__ == "__main__":
    main()

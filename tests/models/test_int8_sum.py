"""Eight-bit products as integer sums: exact as int64 arithmetic, and compiled as they should be."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt_models.layers import int8
from kvrt_models.layers.sums import int8_sum
from tests.marks import slow

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.layers import sum_code

OPTIMISED = True  # see conftest.py: programs as users have them
ALONE = True  # and none from a folder, of which XLA writes no code

# Outputs, groups, inputs of a group: one output and many, odd numbers of groups, odd groups, and
# groups as long as the inputs of a matrix that nothing divides.
SIZES = [
    (1, 1, 64),
    (1, 3, 27),
    (5, 2, 288),
    (40, 9, 64),
    slow((7, 43, 16)),
    (3, 18, 32),
    (2, 1, 97),
    (2, 1, 1000),
    (3, 1, 11_008),
    (2, 1, 65_536),
    slow((262_144, 1, 64)),
]
TOKENS = (1, 3, 8)


def integers(kind, size, n_tokens):
    """Weights, and activations in integers, as far out as both can be or drawn at random."""
    n_outputs, n_groups, g = size
    top, rng = int8_sum.levels(g), np.random.default_rng(0)
    shape, flat = (n_groups, n_outputs, g), (n_tokens, n_groups * g)
    if kind == "random":
        values = rng.integers(-127, 128, shape, np.int8)
        return values, rng.integers(-top, top + 1, flat).astype(np.int16)
    sign = -1 if kind == "least" else 1
    return np.full(shape, 127 * sign, np.int8), np.full(flat, top, np.int16)


@functools.cache
def summing(split):
    def run(whole, values):
        scale = jnp.ones(values.shape[:2], jnp.float32)
        return int8_sum.integer_sums(whole, values, scale, *split)

    return jax.jit(run)


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_64_bit_integers(size):
    _, n_groups, g = size
    for n_tokens in TOKENS:
        split = int8_sum._split(n_tokens, n_groups, g)
        if split is None:  # one token gets a second beside it
            assert n_tokens == 1 and g % 2
            continue
        for kind in ("most", "least", "random"):
            values, whole = integers(kind, size, n_tokens)
            found = np.asarray(summing(split)(whole, values))
            grouped = whole.reshape(n_tokens, n_groups, g).astype(np.int64)
            exact = np.einsum("tkg,kog->tko", grouped, values.astype(np.int64), optimize=True)
            assert np.array_equal(found, exact)
            # The largest use int32 to the last few hundred of its numbers, or all of int16.
            reached = np.abs(exact).max()
            assert kind == "random" or reached == 127 * g * min(32_767, (2**31 - 1) // (127 * g))


def exact_product(x, case):
    """In int64 and float64, with what a few float32 sums may be off."""
    whole, values, scale = case
    step = np.abs(x).max(axis=1).astype(np.float64) / int8_sum.levels(values.shape[2])
    grouped = whole.reshape(len(x), len(values), -1).astype(np.int64)
    sums = np.einsum("tkg,kog->tko", grouped, values.astype(np.int64), optimize=True)
    terms = sums * scale.astype(np.float64) * step[:, None, None]
    return terms.sum(axis=1), (len(values) + 4) * 2.0**-24 * np.abs(terms).sum(axis=1)


def product_case(size, n_tokens=8):
    """Integers of activations, weights and scales; each token's greatest is that of its levels."""
    n_outputs, n_groups, _ = size
    values, whole = integers("random", size, n_tokens)
    whole[:, 0] = int8_sum.levels(size[2])
    return whole, values, np.random.default_rng(1).random((n_groups, n_outputs), np.float32)


product = jax.jit(int8_sum.sum_product)


# Even and odd numbers of groups and of inputs, of which the sums above have other lengths too.
@pytest.mark.parametrize("size", [(1, 3, 27), (40, 9, 64), (3, 18, 32), (2, 1, 97)])
def test_a_token_has_the_same_bits_alone_and_among_others(size):
    whole, values, scale = case = product_case(size)
    whole[6] = 0
    x = whole.astype(np.float32)
    x[3] *= 1e30
    x[5] *= 1e-30
    together = np.asarray(product(x, values, scale))
    exact, allowed = exact_product(x, case)
    assert (np.abs(together - exact) <= allowed).all()
    for n in (1, 2, 3):
        parts = [product(x[i : i + n], values, scale) for i in range(0, 8 - n + 1, n)]
        alone = np.concatenate(parts)
        assert np.array_equal(alone, together[: len(alone)])


@pytest.mark.parametrize("n_tokens", [1, 8])
def test_every_form_takes_the_scales_of_a_file_s_blocks(n_tokens):
    whole, values, scale = product_case((40, 18, 32), n_tokens)
    values[:, :, 5], scale = -128, scale.astype(np.float16)
    scale[0, :3] = 0, 6e-8, 6e4
    x = whole.astype(np.float32)
    exact, allowed = exact_product(x, (whole, values, scale))
    found = np.asarray(product(x, values, scale))
    assert (np.abs(found - exact) <= allowed).all()
    matrix = int8.Int8Matrix(values=values, scale=scale)
    for form in int8.FORMS.values():
        other = np.asarray(jax.jit(form)(x, matrix))
        np.testing.assert_allclose(other, exact, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("size", [(5, 2, 288), (40, 9, 64), (2, 1, 97)])
def test_a_number_that_is_not_finite_stays_in_its_token(size):
    whole, values, scale = product_case(size, 4)
    x = whole.astype(np.float32)
    plain = np.asarray(product(x, values, scale))
    for value in (np.nan, np.inf, -np.inf):
        for column in (0, x.shape[1] // 2, -1):
            spoilt = x.copy()
            spoilt[1, column] = value
            found = np.asarray(product(spoilt, values, scale))
            assert not np.isfinite(found[1]).any()
            assert np.array_equal(np.delete(found, 1, 0), np.delete(plain, 1, 0))
            assert not np.isfinite(np.asarray(product(spoilt[1:2], values, scale))).any()


# --- compiled -------------------------------------------------------------------------------------

# Sizes of SmolLM2's matrices in groups of 64 and 288 inputs, and an odd number of groups.
COMPILED = [(3072, 9, 64), (576, 24, 64), (3072, 2, 288), (49_152, 9, 64), (512, 43, 64)]


def lowered(multiply, size, n_tokens):
    n_outputs, n_groups, g = size
    x = jax.ShapeDtypeStruct((n_tokens, n_groups * g), jnp.float32)
    values = jax.ShapeDtypeStruct((n_groups, n_outputs, g), jnp.int8)
    scale = jax.ShapeDtypeStruct((n_groups, n_outputs), jnp.float32)
    return jax.jit(multiply).lower(x, values, scale)


@functools.cache
def compiled(*case):
    return lowered(*case).compile()


def faults(program, size):
    """What makes a program slow, of what XLA may do to it."""
    text, n_weights = program.as_text(), math.prod(size)
    made = hlo.instructions(text)
    reading = [x for x in calls(text) if any(y.dtype == "s8" and y.size == n_weights for y in x[1])]
    ops = {y.op for _, body in reading for y in body}
    checks = {
        "a sum is rewritten": "reduce-window" in text,
        "weights are widened": any(
            x.size >= n_weights and x.dtype != "s8" and not x.inside for x in made
        ),
        "weights are read twice": len(reading) != 1,
        "one core reads them": os.cpu_count() != 1
        and not all("outer_dimension_partitions" in line for line, _ in reading),
        "each output rounds": bool(ops & {"round-nearest-even", "divide"}),
        "memory": program.memory_analysis().temp_size_in_bytes >= n_weights,
    }
    return {name for name, wrong in checks.items() if wrong}


def calls(text):
    """Fusions of a program: the line of each, and what is inside."""
    bodies = {}
    for block in text.split("\n\n"):
        if head := re.match(r"\s*%([\w.\-]+) \(", block):
            bodies[head[1]] = hlo.instructions(block)
    lines = [x for x in text.splitlines() if " fusion(" in x]
    return [(x, bodies[re.search(r"calls=%([\w.\-]+)", x)[1]]) for x in lines]


@pytest.mark.parametrize("size", [size for size in COMPILED if size[1] % 2])
def test_cores_share_the_outputs_of_a_token_and_not_an_odd_number_of_groups(size):
    text = compiled(int8_sum.sum_product, size, 1).as_text()
    (line,) = (x for x, body in calls(text) if any(y.size == math.prod(size) for y in body))
    assert re.search(rf"= \(s32\[{size[0]},\d+\]\{{1,0\}}", line)


@pytest.mark.parametrize("size", COMPILED)
def test_the_sum_reads_weights_once_and_writes_nothing_of_their_size(size):
    for n_tokens in (1, 2, 8):
        assert faults(compiled(int8_sum.sum_product, size, n_tokens), size) == set()


def plain_sum(x, values, scale):
    """One operand, and activations that nothing keeps out of the loop."""
    n_groups, _, g = values.shape
    whole = jnp.round(x * 100).astype(jnp.int16).reshape(n_groups, 1, g)
    sums = jnp.sum(values.astype(jnp.int32) * whole.astype(jnp.int32), axis=2)
    return jnp.sum(sums.astype(jnp.float32) * scale, axis=0)


def test_the_guard_sees_a_sum_that_is_rewritten():
    found = faults(compiled(plain_sum, COMPILED[0], 1), COMPILED[0])
    assert {"a sum is rewritten", "each output rounds"} <= found


needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")


@needs_objdump
@pytest.mark.parametrize(("multiply", "lost"), [(int8_sum.sum_product, False), (plain_sum, True)])
def test_one_token_s_sum_takes_widening_multiply_adds(tmp_path, multiply, lost):
    size = COMPILED[0]
    lowered(multiply, size, 1).compile({"xla_dump_to": str(tmp_path)})
    counts = sum_code.disassembled(sum_code.kernel(tmp_path, math.prod(size)))
    print(counts)
    assert sum_code.is_lost("int8", counts) == lost


@needs_objdump
@pytest.mark.slow
@pytest.mark.parametrize("isa", ["SSE4_2", "AVX2", "AVX512_VNNI"])
def test_sums_keep_their_instructions_on_other_processors(isa):
    """Several tokens multiply 32-bit integers today, which is no reason to fail."""
    sums = ["--sum=int8"] if isa == "SSE4_2" else []
    command = [sys.executable, "-m", sum_code.__name__, f"--cpu={isa}", "--tokens=1", *sums]
    root, env = Path(__file__).parents[2], {**os.environ, "XLA_FLAGS": ""}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "models")))
    done = subprocess.run(command, cwd=root, env=env, stdout=subprocess.PIPE)
    found = [*map(json.loads, done.stdout.splitlines())]
    print(found)
    assert [x["sum"] for x in found] == (["int8"] if sums else ["int8", "f16", "bf16"])
    assert not any(x.get("lost") for x in found) and done.returncode == 0


def test_the_guard_sees_weights_that_are_widened():
    def widened(x, values, scale):
        wide = values.astype(jnp.float32) * scale[:, :, None]
        return jnp.einsum("tkg,kog->to", x.reshape(-1, *wide.shape[::2]), wide)

    assert {"weights are widened", "memory"} <= faults(
        compiled(widened, COMPILED[0], 2), COMPILED[0]
    )

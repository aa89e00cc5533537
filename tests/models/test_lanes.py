"""Eight-bit products of few tokens: as those of float64, and compiled as they should be."""

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
from jax import lax

from kvrt_models.layers import int8, lanes
from kvrt_models.layers.int8 import Int8Matrix
from kvrt_models.layers.linear import linear
from tests.marks import slow

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.layers import sum_code

OPTIMISED = True  # see conftest.py: programs as users have them
ALONE = True  # and none from a folder, of which XLA writes no code

# Outputs, groups, inputs of a group: one output and many, outputs that fill no register, odd
# groups, groups that are cut, and one as long as the inputs of a matrix that nothing divides.
SIZES = [(1, 1, 64), (5, 2, 288), (40, 9, 64), slow((7, 43, 16)), (3, 18, 32), (17, 1, 97)]


def case(size, n_tokens=8, scale_type=np.float32):
    """A matrix as CPUs have it and by groups, and activations."""
    (n_outputs, n_groups, g), rng = size, np.random.default_rng(0)
    values = rng.integers(-127, 128, (n_groups, n_outputs, g), np.int8)
    scale = rng.random((n_groups, n_outputs), np.float32).astype(scale_type)
    x = rng.standard_normal((n_tokens, n_groups * g)).astype(np.float32)
    return x, Int8Matrix(values=lanes.in_lanes(values), scale=scale), values


def exact_product(x, matrix, values):
    """In float64, and what float32 sums may be off."""
    wide = values.astype(np.float64) * np.asarray(matrix.scale, np.float64)[..., None]
    rows = wide.swapaxes(0, 1).reshape(wide.shape[1], -1)
    # Each input is rounded as it is added, and each of the chunks.
    rounding = (lanes._MOST_TERMS / lanes._CHAINS + len(values) + 6) * 2.0**-24
    return x @ rows.T, rounding * (np.abs(x) @ np.abs(rows).T)


@jax.jit
def product(x, matrix):
    return int8.by_lanes(x, matrix)


@pytest.mark.parametrize("size", SIZES)
def test_outputs_lie_side_by_side_and_come_back(size):
    _, matrix, values = case(size)
    n_parts = -(-size[0] // lanes.LANES)
    assert matrix.values.shape == (n_parts, *size[1:], lanes.LANES)
    assert (matrix.in_lanes, matrix.n_outputs, matrix.n_inputs) == (
        True,
        size[0],
        values[:, 0].size,
    )
    assert np.array_equal(lanes.in_rows(jnp.asarray(matrix.values), size[0]), values)
    rows = np.asarray(int8.dequantize(Int8Matrix(values=values, scale=matrix.scale)))
    ids = np.array([0, size[0] - 1, size[0] // 2], np.int32)
    assert np.array_equal(int8.rows_of(jax.device_put(matrix), ids), rows[ids])


@pytest.mark.parametrize("size", SIZES)
def test_a_token_has_the_same_bits_alone_and_among_others(size):
    x, matrix, values = case(size)
    x[6] = 0
    x[3] *= 1e30
    x[5] *= 1e-30
    together = np.asarray(product(x, matrix))
    exact, allowed = exact_product(x, matrix, values)
    assert (np.abs(together - exact) <= allowed).all() and (together[6] == 0).all()
    for n in (1, 2, 3):
        alone = np.concatenate([product(x[i : i + n], matrix) for i in range(0, 8 - n + 1, n)])
        assert np.array_equal(alone, together[: len(alone)])


@pytest.mark.parametrize("n_tokens", [1, 8, 40])
def test_a_product_takes_the_scales_of_a_file_s_blocks(n_tokens):
    x, matrix, values = case((40, 18, 32), n_tokens, np.float16)
    values[:, :, 5] = -128
    scale = np.array(matrix.scale)
    scale[0, :3] = 0, 6e-8, 6e4
    matrix = Int8Matrix(values=lanes.in_lanes(values), scale=scale)
    exact, allowed = exact_product(x, matrix, values)
    found = np.asarray(int8.int8_product(x, jax.device_put(matrix)))
    # Sums of more tokens are YNNPACK's, in another order.
    assert (np.abs(found - exact) <= allowed * (4 if n_tokens > int8.MOST_IN_LANES else 1)).all()


@pytest.mark.parametrize("size", [(5, 2, 288), (40, 9, 64), (17, 1, 97)])
def test_a_number_that_is_not_finite_stays_in_its_token(size):
    x, matrix, _ = case(size, 4)
    plain = np.asarray(product(x, matrix))
    for value in (np.nan, np.inf, -np.inf):
        for column in (0, x.shape[1] // 2, -1):
            spoilt = x.copy()
            spoilt[1, column] = value
            found = np.asarray(product(spoilt, matrix))
            assert not np.isfinite(found[1]).any()
            assert np.array_equal(np.delete(found, 1, 0), np.delete(plain, 1, 0))
            assert not np.isfinite(np.asarray(product(spoilt[1:2], matrix))).any()


@pytest.mark.parametrize("n_inputs", [64, 192, 1536, 40, 16 * 97])
def test_a_token_s_product_with_float16_weights(n_inputs):
    """Of inputs that fill a register, several chunks of them, and of such as do not."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((40, n_inputs)).astype(np.float16)
    x = rng.standard_normal((1, n_inputs)).astype(np.float32)
    filled = lanes.row_product(jnp.asarray(x), jnp.asarray(weight))
    assert (filled is None) == (n_inputs in (40, 16 * 97))
    exact = x @ weight.astype(np.float64).T
    for found in (linear(x, weight), *([] if filled is None else [filled])):
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    x[0, 3] = np.nan
    assert np.isnan(linear(x, weight)).all()


@pytest.mark.parametrize("n_tokens", [3, 40])
def test_pieces_give_what_the_whole_matrix_does(n_tokens, monkeypatch):
    """Of outputs that fill no register, and of a number that no size divides."""
    for n_outputs in (90, 7 * lanes.LANES):
        x, matrix, _ = case((n_outputs, 3, 16), n_tokens)
        whole = np.asarray(int8.int8_product.__wrapped__(x, jax.device_put(matrix)))
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "_MOST_SUMS", 3 * 3 * 2 * lanes.LANES)
            patch.setattr(int8, "MOST_WIDENED", 48 * 2 * lanes.LANES)
            n_parts = len(matrix.values)
            n = lanes.n_pieces(n_parts, 3, 48, 16), n_parts // int8.piece_size(matrix)
            assert n == ((3, 3) if n_outputs == 90 else (7, 7))
            found = int8.int8_product.__wrapped__(x, jax.device_put(matrix))
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


# --- compiled -------------------------------------------------------------------------------------

# Sizes of SmolLM2's matrices in groups of 64, 288 and 32 inputs, and an odd number of groups.
COMPILED = [(3072, 9, 64), (576, 24, 64), (3072, 2, 288), (49_152, 18, 32), (512, 43, 64)]


def lowered(multiply, size, n_tokens):
    n_outputs, n_groups, g = size
    x = jax.ShapeDtypeStruct((n_tokens, n_groups * g), jnp.float32)
    values = jax.ShapeDtypeStruct((n_outputs // lanes.LANES, n_groups, g, lanes.LANES), jnp.int8)
    scale = jax.ShapeDtypeStruct((n_groups, n_outputs), jnp.float32)
    return jax.jit(multiply).lower(x, values, scale)


@functools.cache
def compiled(*case):
    return lowered(*case).compile()


def after_a_norm(x, values, scale):
    """What makes an input is not computed again for each output, nor a sum for each reader."""
    x = x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True))
    y = lanes.lane_product(x, values, scale)
    return jnp.tanh(y), y[:, ::2] + y[:, 1::2]


def faults(program, size):
    """What makes a program slow, of what XLA may do to it."""
    text, n_weights = program.as_text(), math.prod(size)
    made = hlo.instructions(text)
    reading = [x for x in calls(text) if any(y.dtype == "s8" and y.size == n_weights for y in x[1])]
    ops = {y.op for _, body in reading for y in body}
    checks = {
        "weights are widened": any(
            x.size >= n_weights and x.dtype != "s8" and not x.inside for x in made
        ),
        "weights are read twice": len(reading) != 1,
        "one core reads them": os.cpu_count() != 1
        and not all("outer_dimension_partitions" in line for line, _ in reading),
        "outputs are not innermost": not all(
            re.search(rf"\[(\d+,)+{lanes.LANES}\]\{{3,2,1,0\}} fusion", line) for line, _ in reading
        ),
        "each output computes a norm": "rsqrt" in ops,
        "memory": program.memory_analysis().temp_size_in_bytes >= n_weights,
    }
    return {name for name, wrong in checks.items() if wrong}


def calls(text):
    """The fusions of a program: the line and the instructions of each."""
    bodies = {}
    for block in text.split("\n\n"):
        if head := re.match(r"\s*%([\w.\-]+) \(", block):
            bodies[head[1]] = hlo.instructions(block)
    lines = [x for x in text.splitlines() if " fusion(" in x]
    return [(x, bodies[re.search(r"calls=%([\w.\-]+)", x)[1]]) for x in lines]


@pytest.mark.parametrize("size", COMPILED)
def test_weights_are_read_once_and_nothing_of_their_size_is_written(size):
    for n_tokens in (1, 2):
        assert faults(compiled(after_a_norm, size, n_tokens), size) == set()


def plain_sum(x, values, scale):
    """A sum over inputs as XLA has it, of two parts, which no library takes."""
    n_parts, n_groups, g, n_lanes = values.shape
    terms = values.astype(jnp.float32) * x.reshape(1, n_groups, g, 1)
    parts, zeros = (terms[:, :, : g // 2], terms[:, :, g // 2 :]), (np.float32(0),) * 2
    first, second = lax.reduce(parts, zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), (2,))
    s = scale.reshape(n_groups, n_parts, n_lanes).swapaxes(0, 1)
    return jnp.sum((first + second) * s, axis=1).reshape(1, -1)


def test_the_guard_sees_a_sum_over_inputs():
    assert "outputs are not innermost" in faults(compiled(plain_sum, COMPILED[0], 1), COMPILED[0])


def test_the_guard_sees_weights_that_are_widened():
    def widened(x, values, scale):
        rows = lanes.in_rows(values, scale.shape[1])
        wide = rows.astype(jnp.float32) * scale[:, :, None]
        return jnp.einsum("tkg,kog->to", x.reshape(-1, *wide.shape[::2]), wide)

    assert {"weights are widened", "memory"} <= faults(
        compiled(widened, COMPILED[0], 2), COMPILED[0]
    )


needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")


@needs_objdump
@pytest.mark.parametrize(("multiply", "lost"), [(lanes.lane_product, False), (plain_sum, True)])
def test_a_token_s_products_are_those_of_whole_registers(tmp_path, multiply, lost):
    size = COMPILED[0]
    lowered(multiply, size, 1).compile({"xla_dump_to": str(tmp_path)})
    counts = sum_code.disassembled(sum_code.kernel(tmp_path, math.prod(size)))
    print(counts)
    assert sum_code.is_lost(counts) == lost


@needs_objdump
@pytest.mark.slow
@pytest.mark.parametrize("isa", ["SSE4_2", "AVX2", "AVX512_VNNI"])
def test_sums_keep_their_instructions_on_other_processors(isa):
    sums = ["--sum=int8"] if isa == "SSE4_2" else []
    command = [sys.executable, "-m", sum_code.__name__, f"--cpu={isa}", *sums]
    root, env = Path(__file__).parents[2], {**os.environ, "XLA_FLAGS": ""}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "models")))
    done = subprocess.run(command, cwd=root, env=env, stdout=subprocess.PIPE)
    found = [*map(json.loads, done.stdout.splitlines())]
    print(found)
    wanted = [("int8", 1), ("int8", 8)] + ([] if sums else [("f16", 1), ("bf16", 1)])
    assert [(x["sum"], x["tokens"]) for x in found] == wanted
    assert not any(x.get("lost") for x in found) and done.returncode == 0

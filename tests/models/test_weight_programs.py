"""No compiled program widens what it should read as it is: weights of one or two bytes.

A flag or another XLA could undo it without a word: a step would give the same logits, half as fast.
What YNNPACK takes is decided by type and shape alone, whatever instructions the processor has; a
jaxlib without YNNPACK fails here, and should: eight bits a weight would then be widened each step.
"""

import collections
import functools
import re

import hlo
import jax
import numpy as np
import pytest
import weight_programs as programs

import kvrt.program.programs
from kvrt_models.layers import int8, lanes
from kvrt_models.layers.lanes import LANES
from kvrt_models.load import describe_model

OPTIMISED = True  # see conftest.py: programs as users have them
ALONE = True  # and none from a folder, where one of other settings might lie
N_PROMPT = 512


def widened(text, n_least):
    """Arrays as large as a matrix in another type than that of the weights.

    Those of eight bits may be so nowhere. Half-precision ones are multiplied and summed by one
    fusion, inside of which each number is widened by itself; no such array may leave it.
    """
    large = [x for x in hlo.instructions(text) if x.size >= n_least]
    eight = any(x.dtype == "s8" for x in large)
    allowed = {"s8"} if eight else {"bf16", "f16", "u16"}
    return [x for x in large if x.dtype not in allowed and (eight or not x.inside)]


def reads_eight_bits(of, text):
    """One loop over outputs for each matrix, and no array as large outside of it."""
    matrices = programs.matrices(of)
    # A sum of each output and chunk of inputs, with outputs in lanes.
    sums = collections.Counter(map(sums_of, matrices))
    loops = (tuple(map(int, x.split(","))) for x in _LOOP.findall(text))
    assert collections.Counter(x for x in loops if x in sums) == sums
    allowed = {*sums, *(w.scale.shape for w in matrices)}
    large = [x for x in hlo.instructions(text) if x.size >= programs.smallest_product(of)]
    large = [x for x in large if not x.inside and x.shape not in allowed]
    assert {x.dtype for x in large} == {"s8"}


def sums_of(matrix):
    """The size of a loop's result, for one piece of a large matrix."""
    n_parts, _, g, _ = matrix.values.shape
    n = lanes.n_pieces(n_parts, 1, matrix.n_inputs, g)
    return n_parts // n, 1, matrix.n_inputs // lanes._terms(g), LANES


_LOOP = re.compile(r"= f32\[([\d,]+)\]\{3,2,1,0\} fusion\(")


@pytest.mark.slow
def test_a_step_multiplies_eight_bits_as_they_are():
    of = programs.small("int8")
    assert sorted(w.scale.shape[0] for w in programs.matrices(of)) == [3, 3, 3, 3, 8]
    reads_eight_bits(of, programs.decode_program(of).as_text())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_step_widens_no_half_precision(dtype):
    of = programs.small(dtype)
    text = programs.decode_program(of).as_text()
    assert any(x.dtype == dtype for x in hlo.instructions(text))
    assert widened(text, programs.smallest_product(of)) == []


@pytest.mark.slow
def test_the_guard_sees_what_a_flag_takes_away():
    """Without the fusion of YNNPACK that bfloat16 hangs on, matrices are widened."""
    of = programs.small("bf16")
    text = compiled_with(
        of, xla_cpu_experimental_ynn_fusion_type="LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    )
    found = widened(text, programs.smallest_product(of))
    print({x.shape for x in found})
    assert len(found) >= 5


@pytest.mark.slow
def test_a_processor_with_fewest_instructions_has_the_same_program():
    of = programs.small("int8")
    reads_eight_bits(of, compiled_with(of, xla_cpu_max_isa="SSE4_2"))


def compiled_with(of, **options):
    """A step of one token under other settings of XLA, as XLA_FLAGS has them for a process."""
    plain = jax.stages.Lowered.compile

    def compile(self, compiler_options=None, **rest):
        return plain(self, {**(compiler_options or {}), **options}, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile)
        patch.setattr(kvrt.program.programs, "_made", collections.OrderedDict())
        return programs.prompt_program(of, 1).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("n_tokens", [8, N_PROMPT])
def test_a_prompt_widens_one_matrix_at_a_time(n_tokens):
    """Four layers: all of them widened together would be ten times the largest matrix."""
    sides = {dtype: programs.small(dtype, 4) for dtype in ("f32", "int8")}
    compiled = {name: programs.prompt_program(side, n_tokens) for name, side in sides.items()}
    temp = {name: x.memory_analysis().temp_size_in_bytes for name, x in compiled.items()}
    sizes = [4 * w.values.size for w in programs.matrices(sides["int8"])]
    print(temp, max(sizes), sum(sizes))
    assert sum(sizes) > 9 * max(sizes)
    assert temp["int8"] < temp["f32"] + 1.5 * max(sizes)


def test_no_array_has_the_size_of_a_matrix():
    """A product of a prompt's tokens holds a piece of it: its groups, and these side by side."""
    matrix = int8.shapes((2048, 1024))
    x = jax.ShapeDtypeStruct((N_PROMPT, 1024), np.float32)
    compiled = jax.jit(int8.int8_product).lower(x, matrix).compile()
    made = [y for y in hlo.instructions(compiled.as_text()) if y.dtype != "s8"]
    assert max(y.size for y in made) < matrix.values.size
    # And the sums where they are made and where they go.
    sums = 4 * N_PROMPT * int8.piece_size(matrix) * LANES
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * int8.MOST_WIDENED + 2 * sums


@pytest.mark.parametrize("n_tokens", [32, 64])
def test_a_widened_matrix_comes_first_where_tokens_are_few(n_tokens):
    """YNNPACK multiplies 16 tokens 1.3 times as fast so, and 128 slower."""
    matrix = int8.shapes((2048, 1024))
    x = jax.ShapeDtypeStruct((n_tokens, 1024), np.float32)
    text = jax.jit(int8.int8_product).lower(x, matrix).compile().as_text()
    sums = (int8.piece_size(matrix) * LANES, n_tokens)
    shape = sums if n_tokens == 32 else sums[::-1]
    assert [y.shape for y in hlo.instructions(text) if y.op == "dot"] == [shape]


# --- SmolLM2 --------------------------------------------------------------------------------------


# In the whole decode program, which docs/benchmarks.md states.
# A copy a layer is that of q, k and v, 4 KB, for several readers.
MOST_OPERATIONS, MOST_COPIES = 2250, 180


@functools.cache
def decode_step_of_a_real_model():
    of = describe_model("smollm2-135m", dtype="int8")
    return of, programs.decode_program(of).as_text()


@pytest.mark.model
def test_a_step_of_a_real_model_multiplies_eight_bits_as_they_are():
    of, text = decode_step_of_a_real_model()
    assert len(programs.matrices(of)) == 4 * 30 + 1
    reads_eight_bits(of, text)


@pytest.mark.model
def test_a_step_of_a_real_model_runs_few_operations_and_copies():
    run = hlo.executed(decode_step_of_a_real_model()[1])
    print(f"{len(run):,} operations, {run.count('copy')} copies among them")
    assert run.count("while") > 30, "the text of programs is read wrongly"
    assert len(run) <= MOST_OPERATIONS and run.count("copy") <= MOST_COPIES

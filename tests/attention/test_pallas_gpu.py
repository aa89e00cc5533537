"""The GPU kernel, interpreted on the CPU, against the reference; and its lowering.

With KVRT_TEST_PLATFORM=cuda or rocm it is compiled, and runs there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import kernel_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Form, sized

from kvrt import MaskSpec, RopeSpec
from kvrt.attention.pallas import attend as pallas_attend
from kvrt.attention.pallas import common, gpu
from kvrt.attention.pallas.gpu_kernel import Tiling
from scripts._lib import chips

# Cells of a tile fewer than those of a block, as many, and more: tiles within and across blocks.
FORMS = {"window": sized("window", d=8, block=8), "rows-int8": sized("rows-int8")}
WIDE = {
    "chunked-2-words-24": sized("chunked-2-words", d=24),
    "symmetric-odd-blocks": sized("symmetric", d=48, block=12),
    "int4": Form(heads=3, d=64, k="int4", v="int4", sinks=True),
    "rows-raw-halves": Form(
        tokens=3, rows=True, d=64, k="int2", v="q8_0", raw=RopeSpec(n_rot=64), block=8
    ),
    "raw-neighbours-partial": Form(
        tokens=2, d=64, k="int4", v="q8_0", raw=RopeSpec(n_rot=24, layout="norm"), cap=5.0
    ),
    "many-own": kernel_cases.MANY_OWN,
    "grouped": dataclasses.replace(kernel_cases.GROUPED, tokens=5, k="int4", v="q8_0", d=32),
    "rows-grouped": dataclasses.replace(kernel_cases.GROUPED, tokens=3, rows=True),
    "rows-grouped-write": dataclasses.replace(
        kernel_cases.GROUPED, tokens=3, rows=True, k="int8", v="int8", write=True
    ),
    "many-own-grouped": dataclasses.replace(
        kernel_cases.GROUPED, tokens=pallas_attend.OWN + 9, in_order=True, cap=3.0
    ),
    "many-own-grouped-write": dataclasses.replace(
        kernel_cases.GROUPED, tokens=pallas_attend.OWN + 9, in_order=True, write=True
    ),
    "rows-raw-plain": Form(
        tokens=3,
        heads=3,
        rows=True,
        d=40,
        raw=RopeSpec(n_rot=32, layout="norm"),
        mask=MaskSpec(kind="window", size=20),
        sinks=True,
    ),
}
HALF = {name: sized(name) for name in ("bf16", "int8-bf16")}


@functools.cache
def compiled(form):
    tiling = Tiling(cells=16, queries=16, splits=4)
    interpret = jax.default_backend() != "gpu"
    return kernel_cases.calls(form, gpu.kernel(interpret=interpret, tiling=tiling))


@pytest.mark.parametrize("name", ["window", pytest.param("rows-int8", marks=pytest.mark.slow)])
@given(data=st.data())
@settings(max_examples=25)
def test_equals_the_reference_whatever_is_cached(name, data):
    form = FORMS[name]
    kernel_cases.check(form, compiled(form), data.draw(kernel_cases.values(form)))


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
@given(data=st.data())
@settings(max_examples=25)
def test_equals_the_reference_in_every_form(name, data):
    form = WIDE[name]
    kernel_cases.check(form, compiled(form), data.draw(kernel_cases.values(form)))


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
@given(data=st.data())
@settings(max_examples=15)
def test_half_precision_rounds_weights_and_the_output_alone(name, data):
    form = HALF[name]
    kernel_cases.check(form, compiled(form), data.draw(kernel_cases.values(form)), atol=0.03)


def test_sizes_of_a_program_follow_the_shapes():
    def chosen(p, d, n_kv, dtype, cells):
        def arrays():
            empty = jnp.zeros((1, cells // 16), jnp.int32)
            work = common.KernelWork(
                q=jnp.zeros((1, n_kv, p, d), dtype),
                pos=empty,
                bits=empty[..., None],
                blocks=empty,
                n_blocks=empty[0],
                cell_pos=jnp.zeros((1, 16), jnp.int32),
                cell_seqs=jnp.zeros((1, 16, 1), jnp.int32),
                n_tokens=1,
            )
            rows = jnp.zeros((1, n_kv, d, 16), dtype)
            found.append(gpu.choose_tiling(work, rows, rows))

        found = []
        jax.eval_shape(arrays)
        return found[0]

    assert chosen(4, 128, 8, jnp.bfloat16, 131072) == Tiling(cells=32, queries=16, splits=128)
    assert chosen(4, 128, 8, jnp.bfloat16, 256) == Tiling(cells=32, queries=16, splits=8)
    assert chosen(200, 256, 1, jnp.float32, 1024) == Tiling(cells=16, queries=32, splits=64)


EXPORTED = {
    "window": FORMS["window"],
    "rows-bf16": Form(tokens=2, heads=4, d=128, k="bf16", v="bf16", dtype="bfloat16", rows=True),
    "raw-int4": WIDE["raw-neighbours-partial"],
}


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("rows-bf16", "cuda"),
        pytest.param("window", "cuda", marks=pytest.mark.slow),
        pytest.param("raw-int4", "cuda", marks=pytest.mark.slow),
        pytest.param("raw-int4", "rocm", marks=pytest.mark.slow),
    ],
)
def test_lowers_without_a_gpu(name, platform):
    form = EXPORTED[name]
    kernel, _ = kernel_cases.calls(form, gpu.kernel())
    exported = chips.lowered(kernel, kernel_cases.shapes(form), platform)
    text = exported.mlir_module()
    assert exported.platforms == (platform,)
    # Tokens that are rows of their own have a second one, for the end.
    assert text.count(f"stablehlo.custom_call @{chips.GPU_CALL}") == 1 + form.rows

"""The kernel for Mosaic GPU in JAX's simulation of a GPU, against the reference; and its lowering.

The simulation is public from JAX 0.11.1 on, as are the kernel's other needs; before, it is refused.
With KVRT_TEST_PLATFORM=cuda,cpu the kernel is compiled, and runs on the GPU.
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

from kvrt import RopeSpec
from kvrt.attention import registry
from kvrt.attention.pallas import common, mosaic
from kvrt.attention.pallas.mosaic_kernel import TileSizes
from kvrt.errors import NoKernel
from scripts._lib import chips

served = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 1), reason="the kernel needs JAX 0.11.1; refusals are tested"
)
BIG = dict(d=32, block=64, blocks=3)
WINDOW = sized("window", 70, kv_heads=1, **BIG)
# Tiles as large as a block and smaller; several terms an operand, and several groups a head.
FORMS = {
    "one-token": Form(heads=4, **BIG),
    "rows-int8": sized("rows-int8", d=64, block=32, blocks=4),
    "chunked-2-words": sized("chunked-2-words", d=32),
    "symmetric-q8_0": sized("symmetric", 40, d=64, block=32, k="q8_0", v="q8_0"),
}
HALF = {name: sized(name, **BIG) for name in ("bf16", "f16", "int8-bf16")}


@functools.cache
def compiled(form):
    tiling = TileSizes(cells=32, queries=16, splits=2, stages=2)
    interpret = jax.default_backend() != "gpu"
    return kernel_cases.calls(form, mosaic.kernel(interpret=interpret, tiling=tiling))


@served
@pytest.mark.slow
def test_equals_the_reference():
    for listed in (2, 0):
        drawn = kernel_cases.Values(seed=listed, n_used=129, holes=True, n_listed=listed)
        kernel_cases.check(WINDOW, compiled(WINDOW), drawn)


@served
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@settings(max_examples=10)
def test_equals_the_reference_in_every_form(name, data):
    form = FORMS[name]
    kernel_cases.check(form, compiled(form), data.draw(kernel_cases.values(form)))


@served
@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
@given(data=st.data())
@settings(max_examples=6)
def test_half_precision_rounds_weights_and_the_output_alone(name, data):
    form = HALF[name]
    kernel_cases.check(form, compiled(form), data.draw(kernel_cases.values(form)), atol=0.03)


@served
def test_lowers_without_a_gpu():
    form = Form(tokens=2, heads=4, d=128, block=64, k="bf16", v="bf16", dtype="bfloat16", rows=True)
    kernel, _ = kernel_cases.calls(form, mosaic.kernel())
    exported = chips.lowered(kernel, kernel_cases.shapes(form), "cuda")
    assert exported.mlir_module().count(f"stablehlo.custom_call @{chips.MOSAIC_CALL}") == 1


@served
@pytest.mark.parametrize(
    ("form", "said"),
    [
        (Form(d=48, block=64), "multiples of 32, these are of 48, 48 channels and 64 cells"),
        (Form(d=32, block=16), "32, 32 channels and 16 cells; use 'pallas_gpu'"),
        (Form(d=64, block=64, k="int4", v="int4"), "eight bits without a zero point, not 4 bits"),
        (Form(d=64, block=64, raw=RopeSpec(n_rot=64)), "does not rotate keys; use rope='write'"),
        (
            dataclasses.replace(kernel_cases.GROUPED, d=64, block=64, write=True),
            "use rope='write' without SelfExtend as in the paper, or 'pallas_gpu'",
        ),
        (Form(d=256, block=64), "f32 in heads of 128 channels at most, these have 256"),
    ],
)
def test_what_it_does_not_read_is_refused(form, said):
    kernel, _ = kernel_cases.calls(form, mosaic.kernel())
    with pytest.raises(NoKernel, match=said):
        jax.eval_shape(kernel, *kernel_cases.shapes(form))


def test_an_older_jax_or_gpu_is_refused_in_one_line():
    with pytest.raises(NoKernel, match=r"needs JAX 0\.11\.1 or later, this is 0\.10\.2; update"):
        mosaic.require_support((0, 10, 2))
    mosaic.require_support((0, 11, 1))
    for capability in ("8.0", "8.6", "9.0", "12.1"):
        mosaic.require_capability(capability)
    for capability in ("7.5", "gfx942"):
        with pytest.raises(
            NoKernel, match=rf"capability 8\.0 and later, this one has {capability}"
        ):
            mosaic.require_capability(capability)


def test_a_runtime_is_told_when_it_is_made():
    with pytest.raises(NoKernel, match="'mosaic_gpu' runs on cuda, not on rocm"):
        registry.require("mosaic_gpu", "rocm")
    if jax.__version_info__ < (0, 11, 1):
        with pytest.raises(NoKernel, match=r"needs JAX 0\.11\.1"):
            registry.require("mosaic_gpu", "gpu")
    else:
        registry.require("mosaic_gpu", "gpu")


def test_sizes_of_a_program_follow_the_shapes():
    def chosen(p, d, n_kv, dtype, cells):
        def arrays():
            empty = jnp.zeros((1, cells // 256), jnp.int32)
            work = common.KernelWork(
                q=jnp.zeros((1, n_kv, p, d), jnp.bfloat16),
                pos=empty,
                bits=empty[..., None],
                blocks=empty,
                n_blocks=empty[0],
                cell_pos=jnp.zeros((1, 256), jnp.int32),
                cell_seqs=jnp.zeros((1, 256, 1), jnp.int32),
                n_tokens=1,
            )
            rows = jnp.zeros((1, n_kv, d, 256), dtype)
            found.append(mosaic.choose_sizes(work, rows, rows))

        found = []
        jax.eval_shape(arrays)
        return found[0]

    assert chosen(4, 128, 8, jnp.bfloat16, 131072) == TileSizes(64, mosaic.LEAST_QUERIES, 128, 2)
    assert chosen(4, 128, 8, jnp.int8, 1024) == TileSizes(64, mosaic.LEAST_QUERIES, 16, 2)
    assert chosen(200, 64, 1, jnp.float32, 1024) == TileSizes(32, 32, 32, 3)

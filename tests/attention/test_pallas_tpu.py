"""The TPU kernel, interpreted on the CPU, against the reference; and its lowering.

With KVRT_TEST_PLATFORM=tpu it is compiled, and runs there.
"""

import dataclasses
import functools

import jax
import jax.export
import kernel_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Form

from kvrt import MaskSpec, RopeSpec
from kvrt.attention.pallas import tpu

FORMS = {
    "window": Form(
        tokens=3,
        heads=3,
        d=8,
        block=64,
        blocks=4,
        mask=MaskSpec(kind="window", size=9, n_sink=2),
        cap=2.0,
        scale=0.5,
        sinks=True,
    ),
    "rows-int8": Form(tokens=4, heads=4, rows=True, k="int8", v="int8", block=64),
    "small-blocks-bf16": Form(
        tokens=2, words=2, block=32, k="bf16", v="f32", mask=MaskSpec(kind="chunked", size=16)
    ),
    "rows-raw-halves": Form(
        tokens=3,
        heads=3,
        rows=True,
        d=40,
        block=64,
        raw=RopeSpec(n_rot=32),
        mask=MaskSpec(kind="symmetric", size=20),
        sinks=True,
    ),
    "many-own": kernel_cases.MANY_OWN,
    "grouped": dataclasses.replace(kernel_cases.GROUPED, tokens=5, k="int8", block=128, blocks=2),
    "grouped-write": dataclasses.replace(
        kernel_cases.GROUPED, tokens=5, k="int8", block=128, blocks=2, write=True
    ),
    "two-tiles-of-queries": Form(tokens=150, d=8, kv_heads=1, block=128, blocks=2),
}
HALF = Form(heads=4, d=32, k="bf16", v="int8", dtype="bfloat16", tokens=2, block=128, blocks=3)


@functools.cache
def compiled(form):
    interpret = jax.default_backend() != "tpu"
    return kernel_cases.calls(form, tpu.kernel(interpret=interpret))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@settings(max_examples=20)
def test_equals_the_reference_whatever_is_cached(name, data):
    form = FORMS[name]
    kernel_cases.check(form, compiled(form), data.draw(kernel_cases.values(form)))


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=15)
def test_half_precision_rounds_weights_and_the_output_alone(data):
    kernel_cases.check(HALF, compiled(HALF), data.draw(kernel_cases.values(HALF)), atol=0.03)


EXPORTED = {
    "bf16": Form(heads=4, d=128, block=256, blocks=2, k="bf16", v="bf16", dtype="bfloat16"),
    "rows-int8": Form(tokens=2, d=64, block=256, blocks=2, k="int8", v="int8", rows=True),
    "raw-int8": Form(d=128, block=256, blocks=2, k="int8", v="int8", raw=RopeSpec(n_rot=96)),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("rows-int8", "raw-int8")]


@pytest.mark.parametrize("name", ["bf16", *SLOW])
def test_lowers_without_a_tpu(name):
    form = EXPORTED[name]
    kernel, _ = kernel_cases.calls(form, tpu.kernel())
    exported = jax.export.export(kernel, platforms=["tpu"])(*kernel_cases.shapes(form))
    assert exported.platforms == ("tpu",)
    assert exported.mlir_module().count("stablehlo.custom_call @tpu_custom_call") == 1


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Form(d=32, k="int4"), "a cache or scales of f16: TPUs have no such vectors"),
        (Form(d=32, v="q8_0"), "a cache or scales of f16: TPUs have no such vectors"),
        (Form(k="f16"), "a cache or scales of f16"),
        (Form(raw=RopeSpec(n_rot=8, layout="norm")), "RoPE rotates pairs of neighbours"),
    ],
    ids=["int4", "q8_0", "f16", "neighbours"],
)
def test_refuses_what_it_cannot_read(form, reason):
    kernel, _ = kernel_cases.calls(form, tpu.kernel(interpret=True))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(kernel, *kernel_cases.shapes(form))

"""Weights of eight bits on GPUs and TPUs, as lowered for them: multiplied as they are."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt.cli.setup import model
from kvrt_models.layers import int8
from kvrt_models.weights.types import default_type

PLATFORMS = ("cuda", "rocm", "tpu")


@pytest.fixture(autouse=True)
def on_an_accelerator(monkeypatch):
    """Matrices as GPUs and TPUs have them."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


# Outputs and inputs: a matrix of one group, one of eight, and a large one.
SIZES = [(96, 96), (96, 512), (8192, 320)]
_TENSOR = re.compile(r"tensor<((?:\d+x)+)(\w+)>")


def tensors(text):
    """Types and sizes of all arrays of a module."""
    for dims, dtype in _TENSOR.findall(text):
        yield dtype, int(np.prod([int(d) for d in dims.split("x")[:-1]]))


@functools.cache
def lowered(platform, size, n_tokens):
    x = jax.ShapeDtypeStruct((n_tokens, size[1]), jnp.float32)
    product = jax.jit(lambda x, matrix: int8.int8_product(x, matrix))
    export = jax.export.export(product, platforms=[platform])
    return export(x, int8.shapes(size)).mlir_module()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_array_of_the_weights_size_is_made_of_them(platform, size):
    """One token: what is as large as a group of the weights is the weights, in eight bits."""
    text = lowered(platform, size, 1)
    groups, n_outputs, g = int8.shapes(size).values.shape
    large = {dtype for dtype, n in tensors(text) if n >= n_outputs * g}
    assert large == {"i8"}
    (dot,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    # Both operands are integers of eight bits, two columns for a token; sums have 32 bits.
    batch = f"{groups}x" if groups > 1 else ""
    assert f"tensor<{batch}{n_outputs}x{g}xi8>, tensor<{batch}2x{g}xi8>" in dot
    assert f"-> tensor<{batch}{n_outputs}x2xi32>" in dot


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_prompt_takes_the_same_form(platform):
    """So a token has the same logits alone and in a prompt, but for the order of float sums."""
    text = lowered(platform, SIZES[1], 100)
    assert "tensor<8x96x64xi8>, tensor<8x200x64xi8>" in text
    assert ("f32", 96 * 512) not in tensors(text)


def test_the_guard_sees_a_matrix_that_is_widened():
    x = jax.ShapeDtypeStruct((1, 96), jnp.float32)
    widened = jax.jit(lambda x, matrix: x @ int8.dequantize(matrix).T)
    export = jax.export.export(widened, platforms=["cuda"])
    found = set(tensors(export(x, int8.shapes(SIZES[0])).mlir_module()))
    assert ("f32", 96 * 96) in found and ("i8", 96 * 96) in found


@pytest.mark.parametrize(
    ("platform", "dtype"),
    [("cpu", "int8"), ("gpu", "bf16"), ("cuda", "bf16"), ("rocm", "bf16"), ("tpu", "bf16")],
)
def test_the_default_type_of_a_platform(platform, dtype, monkeypatch):
    assert default_type(platform) == dtype
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    found = model.choose_weights(None)
    assert (found.dtype, found.why) == (dtype, f"default on {platform}")
    assert model.choose_weights("int8") == model.WeightsChoice(dtype="int8")

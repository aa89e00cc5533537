"""Forms of a product with int8 weights at SmolLM2's sizes, interleaved: time, error, compiling.

    python -m scripts.bench.layers.products --tokens 16,32
    python -m scripts.bench.layers.products --tokens 512 --sizes 1536x576

"lanes" and "widened" are those of CPUs, "int8" that of GPUs and TPUs. The rest are bounds of what
else XLA could do: matrices of float32, bfloat16 and int8 as they are, without scales, and
activations in two parts where one has eight bits. An error is the largest against float64 in the
largest output.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from kvrt_models.layers import int8
from scripts._lib import measure

_SIZES = ["576x576", "192x576", "1536x576", "576x1536", "49152x576"]
_TOKENS = flags.DEFINE_list("tokens", ["16", "32", "512"], "Tokens of a product.")
_SHAPES = flags.DEFINE_list("sizes", _SIZES, "Outputs x inputs of the matrices.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Runs of each form.", lower_bound=1)

Product = Callable[[jax.Array, Any], jax.Array]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    for tokens in map(int, _TOKENS.value):
        for size in _SHAPES.value:
            _measure(tokens, *map(int, size.split("x")))


def _measure(n_tokens: int, n_outputs: int, n_inputs: int) -> None:
    """Emits a line for each form, all in turn."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n_tokens, n_inputs), np.float32)
    weight = rng.standard_normal((n_outputs, n_inputs), np.float32)
    sides = _bounds(int8.quantize(weight, n_inputs)) | _forms(weight)
    runs, errors, compile_s = {}, {}, {}
    for name, (product, matrix) in sides.items():
        matrix = jax.device_put(matrix)
        lowered, start = jax.jit(product).lower(x, matrix), time.process_time()
        compiled = lowered.compile()
        compile_s[name] = round(time.process_time() - start, 2)
        runs[name] = lambda compiled=compiled, matrix=matrix: compiled(x, matrix)
        exact = x.astype(np.float64) @ _wide(matrix).T
        errors[name] = np.abs(runs[name]() - exact).max() / np.abs(exact).max()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS.value):
        for name, run in runs.items():
            seconds[name] += measure.clock(run, 1)
    for name, samples in seconds.items():
        row = {"form": name, "tokens": n_tokens, "size": [n_outputs, n_inputs]}
        figures = {"compile_cpu_s": compile_s[name], "error": float(f"{errors[name]:.1e}")}
        measure.emit("products", **row, ms=measure.quartiles(samples, digits=3), **figures)


def _forms(weight: np.ndarray) -> dict[str, tuple[Product, Any]]:
    """What models take, with 64 inputs a scale."""
    rows = int8.quantize(weight)
    on_cpu = int8.for_device(rows)
    return {
        "lanes": (int8.by_lanes, on_cpu),
        "widened": (int8.by_widened, on_cpu),
        "int8": (int8.int8_product, rows),
    }


def _bounds(matrix: int8.Int8Matrix) -> dict[str, tuple[Product, Any]]:
    """Products with the integers of one group, as they are or widened beforehand."""
    values = np.asarray(matrix.values[0])
    return {
        "float32": (_dot, values.astype(np.float32)),
        "bfloat16 in two": (_bf16_in_two, values.astype(jnp.bfloat16)),
        "int8 in two": (_int8_in_two, values),
        "uint8 in two": (_uint8_in_two, values),
    }


def _bf16_in_two(x: jax.Array, matrix: jax.Array) -> jax.Array:
    first = x.astype(jnp.bfloat16)
    # Else XLA keeps the float32 and the rest is nothing.
    rest = (x - lax.reduce_precision(x, 8, 7)).astype(jnp.bfloat16)
    return jnp.sum(_stacked(first, rest, matrix, jnp.float32), axis=0)


def _int8_in_two(x: jax.Array, matrix: jax.Array) -> jax.Array:
    step = jnp.max(jnp.abs(x), axis=1, keepdims=True) / (127 * 254)
    whole = jnp.round(x / step).astype(jnp.int32)
    first = (whole + 127) // 254
    y = _stacked(first.astype(jnp.int8), (whole - first * 254).astype(jnp.int8), matrix, jnp.int32)
    return (y[0].astype(jnp.float32) * 254 + y[1].astype(jnp.float32)) * step


def _uint8_in_two(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Unsigned activations, for which processors with VNNI have an instruction."""
    step = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 32_767
    whole = jnp.round(x / step).astype(jnp.int32) + 32_768
    y = _stacked(
        (whole // 256).astype(jnp.uint8), (whole % 256).astype(jnp.uint8), matrix, jnp.int32
    )
    offset = 32_768 * jnp.sum(matrix.astype(jnp.int32), axis=1).astype(jnp.float32)
    return (y[0].astype(jnp.float32) * 256 + y[1].astype(jnp.float32) - offset) * step


def _stacked(first: jax.Array, rest: jax.Array, matrix: jax.Array, dtype: Any) -> jax.Array:
    """Both parts of the activations by one product, [2, T, O]."""
    rows = lax.optimization_barrier(jnp.concatenate([first, rest]))
    y = lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return lax.optimization_barrier(y).reshape(2, -1, y.shape[1])


def _dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))


def _wide(matrix: Any) -> np.ndarray:
    wide = int8.dequantize(matrix) if isinstance(matrix, int8.Int8Matrix) else matrix
    return np.asarray(wide, np.float64)


if __name__ == "__main__":
    app.run(main)

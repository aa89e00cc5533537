"""The fastest form of an eight-bit product of one token, as `kvrt doctor` measures it.

What it finds is kept in the cache folder for later starts, where it is clearly faster than the
rule's form. Nothing else measures, and a model that is open never changes its forms.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.errors import SaveError, UsageError
from kvrt.files import atomic
from kvrt.files.cache_folder import cache_dir, private_folder
from kvrt.jax_settings import compiler_options
from kvrt_models.layers import int8

Few = Literal["sum", "int8"]
FOLDER, _NAME = "weights", "int8_forms.json"  # in the cache folder
# How many times as fast another form has to be before it replaces the rule's.
_CLEARLY = 1.2
# Outputs and inputs of a matrix, how many of them, and runs over all.
_SIZE, _N_MATRICES, _N_RUNS = (3072, 576), 8, 15


def measure() -> dict[str, float]:
    """Milliseconds of a product of one token by form; "f32" is with weights of float32.

    The best of interleaved runs over eight matrices of 3,072 outputs and 576 inputs, a second.
    """
    rng = np.random.default_rng(0)
    wide = [rng.standard_normal(_SIZE, dtype=np.float32) for _ in range(_N_MATRICES)]
    narrow = [jax.device_put(int8.quantize(w)) for w in wide]
    sides = {form: _runs(int8.FORMS[form], narrow) for form in get_args(Few)}
    sides["f32"] = _runs(_dot, [jax.device_put(w) for w in wide])
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(_N_RUNS):
        for name, run in sides.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: min(took) / _N_MATRICES * 1e3 for name, took in times.items()}


def keep_fastest(ms: Mapping[str, float], rule: Few, processor: str) -> None:
    """Keeps the fastest form for later starts, or forgets what was kept where the rule's serves.

    Args:
      ms: what `measure` found.
      rule: the form that is taken without a measurement.
      processor: what it holds for.
    """
    best = min(get_args(Few), key=ms.__getitem__)
    # Where nothing can be written, later starts follow the rule.
    with contextlib.suppress(OSError, UsageError, SaveError):
        if ms[best] * _CLEARLY > ms[rule]:
            (cache_dir() / FOLDER / _NAME).unlink(missing_ok=True)
            return
        path = private_folder(FOLDER) / _NAME
        data = json.dumps({"processor": processor, "few": best}).encode()
        atomic.replace(path, lambda fd: atomic.write_at(fd, data, 0))


def kept_fastest(processor: str) -> Few | None:
    """The form that was kept for this processor; None is that of the rule."""
    try:
        path: Path = cache_dir() / FOLDER / _NAME
        notes = json.loads(path.read_text())
        few = notes["few"] if notes["processor"] == processor else None
    except (OSError, UsageError, ValueError, LookupError, TypeError):
        return None
    return few if few in get_args(Few) else None


def _runs(product: Callable[[jax.Array, Any], jax.Array], matrices: list[Any]) -> Callable[[], Any]:
    """Runs a compiled product with each of the matrices."""
    x = jnp.ones((1, _SIZE[1]), jnp.float32)
    compiled = jax.jit(product).lower(x, matrices[0]).compile(compiler_options())

    def run() -> None:
        jax.block_until_ready([compiled(x, matrix) for matrix in matrices])

    run()
    return run


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))

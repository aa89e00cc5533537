"""Which form of an eight-bit product is fastest for how many tokens: by processor, or as measured.

A start measures nothing: it takes what `kvrt doctor` has measured and kept on this machine, and
without that what was measured on a processor with the same instructions.
"""

import functools
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import Array
from kvrt.files.kept import keep, kept_path, read_kept
from kvrt_models.layers import int8
from kvrt_models.layers.int8 import Form, Forms, Int8Matrix, Limits

_SCHEMA, _KIND = 1, "int8_products"
# Of processors that multiply and add integers of eight bits in one instruction: Zen 4, jaxlib
# 0.10.2. `Forms()` is of one without them, Zen 3.
_VNNI = frozenset({"avx512_vnni", "avx_vnni"})
_WITH_VNNI = Forms(whole=((64, "int8"), (1 << 30, "f32")), pieces=((32, "int8"), (1 << 30, "f32")))
# Matrices, and their outputs and inputs: several that follow one another, as in a model, for the
# memory of a program is its own, and what one product widened the next finds in the core's cache.
_WHOLE, _PIECES = (4, 1536, 1536), (1, 16_384, 512)
# A single token is in no doubt: the other forms write four bytes for each that they read.
_WHOLE_TOKENS, _PIECES_TOKENS = (8, 32, 128), (16, 64)
_N_ROUNDS = 6
# What a form has to win over the integers, which take no memory beside them.
_ADVANTAGE = 1.1

Timer = Callable[[Callable[[], Any]], float]


def forms_by_processor() -> Forms:
    """The forms of processors with this one's instructions."""
    return _WITH_VNNI if _VNNI & set(_features()) else Forms()


def measured_forms(folder: Path) -> Forms:
    """The forms of this machine: those a file in the folder has, or what is measured now.

    Measuring takes half a minute, once; see `kvrt.files.kept` for what happens to a file that is
    damaged or cannot be written.
    """
    kept = kept_forms(folder)
    if kept is not None:
        return kept
    forms, key = measure_forms(), processor_key()
    keep(kept_path(folder, _KIND, key), key, {"whole": forms.whole, "pieces": forms.pieces})
    return forms


def kept_forms(folder: Path) -> Forms | None:
    """The forms of this machine, if they were measured already."""
    key = processor_key()
    path = kept_path(folder, _KIND, key)
    return read_kept(path, key, _from_json, "kvrt doctor measures eight-bit products")


def processor_key() -> dict[str, Any]:
    """What the figures depend on: processor and compiler."""
    return {
        "schema": _SCHEMA,
        "processor": _processor(),
        "n_cpus": os.cpu_count(),
        "device": jax.local_devices()[0].device_kind,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def measure_forms(seconds: Timer | None = None) -> Forms:
    """Measures all forms on made-up matrices.

    Args:
      seconds: how long a call takes; a test gives its own.
    """
    seconds = seconds or _seconds
    return Forms(
        whole=_limits(_WHOLE, _WHOLE_TOKENS, seconds),
        pieces=_limits(_PIECES, _PIECES_TOKENS, seconds),
    )


def forms_line(forms: Forms) -> str:
    """One line for people, e.g. "int8 to 22 tokens, then f32; large matrices: always int8"."""
    return f"{_limits_line(forms.whole)}; large matrices: {_limits_line(forms.pieces)}"


def limits_of(tokens: Sequence[int], best: Sequence[Form]) -> Limits:
    """Limits between numbers of tokens whose best forms differ: half-way, as ratios go."""
    limits: list[tuple[int, Form]] = []
    for i, form in enumerate(best[:-1]):
        if form != best[i + 1]:
            limits.append((math.isqrt(tokens[i] * tokens[i + 1]), form))
    return (*limits, (1 << 30, best[-1]))


def _limits_line(limits: Limits) -> str:
    *parts, (_, last) = limits
    told = [f"{form} to {most}" + ("" if i else " tokens") for i, (most, form) in enumerate(parts)]
    return ", ".join([*told, f"then {last}"]) if told else f"always {last}"


def _limits(size: tuple[int, int, int], tokens: Sequence[int], seconds: Timer) -> Limits:
    count, *shape = size
    matrices = [_drawn(i, *shape) for i in range(count)]
    return limits_of(tokens, [_fastest(matrices, n, seconds) for n in tokens])


def _fastest(matrices: Sequence[Int8Matrix], n_tokens: int, seconds: Timer) -> Form:
    x = jnp.ones((n_tokens, matrices[0].n_inputs), jnp.float32)
    calls: dict[Form, Callable[[], Any]] = {}
    for form in int8.FORMS:
        chain = functools.partial(_chain, form)
        calls[form] = functools.partial(jax.jit(chain).lower(x, matrices).compile(), x, matrices)
    taken = dict.fromkeys(calls, math.inf)
    for _ in range(_N_ROUNDS):
        for form, call in calls.items():
            taken[form] = min(taken[form], seconds(call))
    best: Form = min(calls, key=lambda form: taken[form])
    return best if taken["int8"] > _ADVANTAGE * taken[best] else "int8"


def _chain(form: Form, x: Array, matrices: Sequence[Int8Matrix]) -> Array:
    for matrix in matrices:
        x = int8.by_form(form, x[:, : matrix.n_inputs], matrix)
    return x


def _drawn(seed: int, n_outputs: int, n_inputs: int) -> Int8Matrix:
    drawn = np.random.default_rng(seed).standard_normal((n_outputs, n_inputs), np.float32)
    return jax.tree.map(jnp.asarray, int8.quantize(drawn))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _processor() -> str:
    """Its name, as far as the system tells it."""
    name = " ".join(_cpuinfo("model name")) or platform.processor()
    return f"{name} {platform.machine()} {len(_features())}"


def _features() -> list[str]:
    """Its instructions, as far as the system tells them."""
    return _cpuinfo("flags")


def _cpuinfo(name: str) -> list[str]:
    """The words of the first line of this name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((x.partition(":")[2].split() for x in lines if x.startswith(name)), [])


def _from_json(value: Any) -> Forms:
    """Forms as a file has them; raises ValueError, KeyError or TypeError for what is none."""
    limits: list[Limits] = [
        tuple((most, form) for most, form in value[x]) for x in ("whole", "pieces")
    ]
    for kind in limits:
        tokens = [most for most, _ in kind]
        if not kind or tokens != sorted(map(int, tokens)) or {f for _, f in kind} - {*int8.FORMS}:
            raise ValueError("no limits of forms")
    return Forms(whole=limits[0], pieces=limits[1])

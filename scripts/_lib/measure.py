"""What the benchmarks share: filled caches, samples, quartiles, and one JSON line a result."""

import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend
from rich.table import Table

from kvrt import Runtime

# Results so far, which `tables` shows at the end of a script.
emitted: list[dict[str, Any]] = []


def emit(name: str, **figures: Any) -> dict[str, Any]:
    """Prints one result with the device, the versions and the commit it belongs to; gives it."""
    emitted.append({"bench": name, **figures})
    print(json.dumps(emitted[-1] | where()), flush=True)
    return emitted[-1]


def tables(
    lines: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), **style: Any
) -> Iterator[Table]:
    """A table of each bench; what all its lines say alike stands above it.

    Args:
      lines: results.
      columns: fields that are shown, in this order; all where none is named.
      style: of the tables.
    """
    for bench in dict.fromkeys(line["bench"] for line in lines):
        mine = [line for line in lines if line["bench"] == bench]
        fields = columns or [x for x in dict.fromkeys(k for of in mine for k in of) if x != "bench"]
        texts = {x: [_text(line.get(x)) for line in mine] for x in fields}
        same = {x: of[0] for x, of in texts.items() if len(mine) > 1 and len({*of}) == 1}
        shown = [x for x in fields if x not in same and any(texts[x])]
        about = ", ".join(f"{x} {text}" for x, text in same.items() if text)
        table = Table(*shown, title=f"{bench}: {about}" if about else bench, **style)
        for row in zip(*(texts[x] for x in shown), strict=True):
            table.add_row(*row)
        yield table


def _text(value: Any) -> str:
    """A figure to be read: of quartiles the median, and the others behind it."""
    if value is None:
        return ""
    if isinstance(value, list) and len(value) == 3 and not isinstance(value[0], str | list):
        low, median, high = value
        return f"{median} ({low} to {high})"
    return f"{value:,}" if type(value) is int else str(value)


def quartiles(samples: Sequence[float], *, scale: float = 1e3, digits: int = 2) -> list[float]:
    """Lower quartile, median and upper quartile, in milliseconds if samples are seconds."""
    return [round(float(x) * scale, digits) for x in np.quantile(samples, (0.25, 0.5, 0.75))]


def clock(
    run: Callable[[], Any],
    n: int,
    *,
    again: Callable[[], None] = lambda: None,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    most_s: float = math.inf,
) -> list[float]:
    """Seconds of each of n calls; of fewer, but at least one, where they take longer than most_s.

    Args:
      run: what is timed.
      n: calls.
      again: makes ready for a call, untimed.
      wait: waits for what `run` gives.
      most_s: seconds after which no other call begins.
    """
    samples, end = [], time.perf_counter() + most_s
    while len(samples) < n and (not samples or time.perf_counter() < end):
        again()
        start = time.perf_counter()
        wait(run())
        samples.append(time.perf_counter() - start)
    return samples


@functools.cache
def copy_gb_s(n_runs: int = 31) -> float:
    """GB/s of a copy by one compiled program, reads and writes counted; measured once a process.

    The copy is greater than the caches of a processor, and adds one so that it cannot be left out.
    """
    n_bytes = 1 << 28 if jax.default_backend() == "cpu" else 1 << 31
    return copy_bandwidth([jnp.zeros(n_bytes // 4, jnp.float32)], n_runs)


def copy_bandwidth(arrays: Sequence[jax.Array], n_runs: int) -> float:
    """GB/s of a copy of the arrays by one compiled program, reads and writes counted."""
    copy = jax.jit(lambda xs: [x + jnp.ones((), x.dtype) for x in xs], donate_argnums=0)
    held = [jnp.zeros_like(x) for x in arrays]

    def run() -> list[jax.Array]:
        nonlocal held
        held = copy(held)
        return held

    median = float(np.median(clock(run, n_runs + 1)[1:]))
    return 2 * sum(x.nbytes for x in held) / median / 1e9


def beside_copy(samples: Sequence[float], n_bytes: int) -> dict[str, float]:
    """The rate at which n_bytes moved, beside that of a copy."""
    gb_s, copy = n_bytes / float(np.median(samples)) / 1e9, copy_gb_s()
    found = {"gb_s": round(gb_s, 2), "copy_gb_s": round(copy, 2)}
    return found | {"share_of_copy": round(gb_s / copy, 3)}


@functools.cache
def product_tflop_s(dtype: str, n_runs: int = 11) -> float:
    """TFLOP/s of a product of large matrices of dtype, summed in float32; once a process."""
    n = 2048 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((n, n), dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    median = float(np.median(clock(lambda: product(x, x), n_runs + 1)[1:]))
    return 2 * n**3 / median / 1e12


def gib(n_bytes: float) -> float:
    """Bytes in GiB, to be read."""
    return round(n_bytes / 2**30, 2)


def fill(runtime: Runtime, n: int) -> None:
    """A sequence 0 of n tokens and nothing else; the text means nothing."""
    runtime.clear()
    rng = np.random.default_rng(n)
    runtime.append(rng.integers(0, min(runtime.n_vocab, 10_000), n).tolist())


def steps(runtime: Runtime, n: int) -> Iterator[float]:
    """Seconds of each of n greedy decode steps, the wait for the token included."""
    tokens = runtime.generate()
    for _ in range(3):
        next(tokens)
    for _ in range(n):
        start = time.perf_counter()
        next(tokens)
        yield time.perf_counter() - start


@functools.cache
def where() -> dict[str, Any]:
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "n_cpus": os.cpu_count(),
        **versions,
        "platform": _one_line(backend.get_backend().platform_version),
        "commit": _commit(),
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"

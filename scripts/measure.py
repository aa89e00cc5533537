"""What the benchmarks share: filled caches, samples, quartiles, and one JSON line a result."""

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvrt import Runtime


def emit(name: str, **figures: Any) -> None:
    """Prints one result with the device, the versions and the commit it belongs to."""
    print(json.dumps({"bench": name, **figures, **_where()}), flush=True)


def quartiles(samples: Sequence[float], *, scale: float = 1e3, digits: int = 2) -> list[float]:
    """Lower quartile, median and upper quartile, in milliseconds if samples are seconds."""
    return [round(float(x) * scale, digits) for x in np.quantile(samples, (0.25, 0.5, 0.75))]


def clock(run: Callable[[], Any], n: int) -> list[float]:
    """Seconds of each of n calls; what they return is waited for."""
    samples = []
    for _ in range(n):
        start = time.perf_counter()
        jax.block_until_ready(run())
        samples.append(time.perf_counter() - start)
    return samples


def fill(runtime: Runtime, n: int) -> None:
    """A sequence 0 of n tokens and nothing else; the text means nothing."""
    runtime.clear()
    rng = np.random.default_rng(n)
    runtime.append(rng.integers(100, 10000, n).tolist())


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
def _where() -> dict[str, Any]:
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "n_cpus": os.cpu_count(),
        **versions,
        "commit": _commit(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"

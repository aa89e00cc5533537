"""What has to be right before the first step: the folder of compiled programs, and memory."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from kvrt import jax_settings
from kvrt.attention.registry import AUTO, require
from kvrt.cli.process.output import warn
from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.errors import BadConfig, KvrtError, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.program import disk_hits
from kvrt.program.estimate import of_blocks, of_cells
from kvrt.program.mesh import MeshSpec

_MEMINFO = Path("/proc/meminfo")
_NO_MEMORY = "RESOURCE_EXHAUSTED"


def check_device(attention: str = AUTO) -> None:
    """Starts JAX's backend under kvrt's settings; it has to have what computes attention.

    Raises:
      KvrtError: there is none of those that JAX was told to use.
      NoKernel: the kernel asked for is one of other devices.
    """
    jax_settings.set_for_process()
    try:
        jax.devices()
    # Some versions of JAX assert instead when a platform has no plugin at all.
    except (RuntimeError, AssertionError) as error:
        found = str(error).partition("\n")[0] or "none of the named platforms has a plugin"
        raise KvrtError(
            f"JAX finds no device: {found}; unset JAX_PLATFORMS, or install JAX for that device"
        ) from error
    require(attention, jax.default_backend())


def keep_programs_or_warn() -> None:
    """`kvrt.keep_programs`; a folder that cannot be used costs time only, and is a warning."""
    try:
        disk_hits.keep_programs()
    except UsageError as error:
        warn(str(error))


def check_memory(
    groups: Sequence[GroupSpec],
    config: CacheConfig,
    recurrent: RecurrentSpec | None = None,
    *,
    paged: bool = False,
    mesh: MeshSpec | None = None,
    widened: int = 0,
) -> None:
    """Refuses a cache that is larger than the memory left, where that is known.

    Of a mesh the memory of one device counts, and an even share; simulated devices have one memory.

    Args:
      groups: of the model.
      config: of the cache.
      recurrent: of the model.
      paged: tokens lie in blocks.
      mesh: of devices.
      widened: bytes of a matrix of eight bits that a prompt's products hold in float32.

    Raises:
      BadConfig: it would not fit.
    """
    how = of_blocks if paged else of_cells
    wanted, left = how(groups, recurrent, config).n_bytes + widened, available_bytes()
    if mesh is not None and jax.default_backend() != "cpu":
        wanted = -(-wanted // mesh.n_devices)
    if wanted > left:
        what = "tokens in blocks" if paged else "cells"
        beside = f" (with {_gb(widened)} for a widened matrix)" if widened else ""
        raise BadConfig(
            f"a cache of {config.n_ctx:,} {what} needs {_gb(wanted)}{beside}, {_gb(left)} are "
            "available; "
            "lower -c, or halve it with --cache_type_k bf16 --cache_type_v bf16"
        )


@contextlib.contextmanager
def enough_memory() -> Iterator[None]:
    """Turns a failed allocation, of NumPy or of the device, into a message.

    Raises:
      KvrtError: memory ran out.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and _NO_MEMORY not in str(error):
            raise
        found = str(error).partition("\n")[0].removeprefix(f"{_NO_MEMORY}: ")
        raise KvrtError(
            f"out of memory ({found or 'the system has none left'}); lower -c or --n_ubatch, or "
            "choose bf16 with --dtype, --cache_type_k and --cache_type_v"
        ) from error


def available_bytes(meminfo: Path = _MEMINFO) -> float:
    """Memory that the device can still give, infinite where nobody says."""
    if jax.default_backend() != "cpu":
        stats = jax.local_devices()[0].memory_stats() or {}
        if "bytes_limit" not in stats:
            return math.inf
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if not meminfo.exists():
        return math.inf
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    found = lines.get("MemAvailable", "").split()
    return int(found[0]) * 1024 if found else math.inf


def _gb(n_bytes: float) -> str:
    return f"{np.ceil(n_bytes / 1e7) / 100:.2f} GB"

"""What has to be right before the first step: devices, memory, kept programs, other processes."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvrt import jax_settings
from kvrt.attention import registry
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.flags.groups import AUTO, DeviceFlags, MeshFlags
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import output
from kvrt.cli.process.output import warn
from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.errors import BadConfig, KvrtError, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.program import disk_hits
from kvrt.program.estimate import of_blocks, of_cells
from kvrt.program.mesh import MeshSpec

_MEMINFO = Path("/proc/meminfo")
_NO_MEMORY = "RESOURCE_EXHAUSTED"


def check_device(attention: str = registry.AUTO) -> None:
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
    registry.require(attention, jax.default_backend())


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


_STDOUT = 1
# Without a word from a process for so long the others take it for dead, and JAX ends them. Its
# default, 100 s, leaves a job waiting; a process that compiles or reads still says its word.
_HEARTBEAT_S = 20


def mesh(options: DeviceFlags) -> MeshSpec | None:
    """The mesh that the flags mean.

    Raises:
      UsageError: an axis that does not exist, or a size below one.
    """
    try:
        return None if options.mesh is None else MeshSpec.parse(options.mesh)
    except BadConfig as error:
        raise UsageError(f"--{error}") from error


@contextlib.contextmanager
def other_processes(options: MeshFlags) -> Iterator[None]:
    """Meets the other processes, if there are any, and says nothing in any but the first.

    What ends another process is reported all the same, for it leaves this block.

    Raises:
      UsageError: the mesh makes no sense.
      KvrtError: the processes do not find each other.
    """
    mesh(options)
    if options.coordinator is None:
        yield
        return
    with _own_output():
        _meet(options)
        try:
            with contextlib.nullcontext() if jax.process_index() == 0 else _silence():
                yield
        except jax.errors.JaxRuntimeError as error:
            # Now, for JAX ends this process while it waits for one that has died.
            found = str(error).partition("\n")[0]
            output.complain(
                f"a step of all processes failed, as it does once one of them has ended: {found}; "
                "look at what the others said, and start all of them again (this one ends within "
                f"{_HEARTBEAT_S} seconds)"
            )
            raise
        finally:
            jax.distributed.shutdown()


@contextlib.contextmanager
def _own_output() -> Iterator[None]:
    """Keeps standard output for Python: the library that processes talk by prints to file 1."""
    sys.stdout.flush()
    kept, nowhere = os.dup(_STDOUT), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDOUT)
    os.close(nowhere)
    try:
        with open(kept, "w", closefd=False) as ours, contextlib.redirect_stdout(ours):
            yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _meet(options: MeshFlags) -> None:
    # What processes on the CPU talk by; other devices have ways of their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if options.coordinator == AUTO:
            jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_S)
        else:
            jax.distributed.initialize(
                options.coordinator,
                options.n_processes,
                options.process_id,
                heartbeat_timeout_seconds=_HEARTBEAT_S,
            )
    except (ValueError, RuntimeError) as error:
        found = str(error).partition("\n")[0]
        raise KvrtError(
            f"the processes do not meet at --coordinator {options.coordinator}: {found}; check "
            "that all are started with the same flags"
        ) from error


@contextlib.contextmanager
def ready(options: EvalFlags | BatchOptions) -> Iterator[None]:
    """A block with the devices that the flags name; memory that runs out in it is one line.

    Raises:
      KvrtError: there is no such device, or the processes do not meet.
    """
    joined = contextlib.nullcontext()
    if isinstance(options, MeshFlags):
        joined = other_processes(options)
    with joined:
        check_device(options.attention)
        keep_programs_or_warn()
        with enough_memory():
            yield


def choosing(attention: str, *, quiet: bool) -> AbstractContextManager[Any]:
    """A status line while "auto" may test a kernel of this device, which takes seconds once."""
    kernels = registry.kernels(jax.default_backend()) if attention == registry.AUTO else ()
    return output.waiting(f"self-test of {', '.join(kernels)}", bool(kernels) and not quiet)

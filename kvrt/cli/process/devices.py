"""The devices of a block of work: processes that join, of which the first alone prints; kernels."""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from kvrt.attention import registry
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.flags.groups import AUTO, DeviceFlags, MeshFlags
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import output, startup, status
from kvrt.errors import BadConfig, KvrtError, UsageError
from kvrt.program.mesh import MeshSpec

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
        startup.check_device(options.attention)
        startup.keep_programs_or_warn()
        with startup.enough_memory():
            yield


def choosing(attention: str, *, quiet: bool) -> AbstractContextManager[Any]:
    """A status line while "auto" may test a kernel of this device, which takes seconds once."""
    kernels = registry.kernels(jax.default_backend()) if attention == registry.AUTO else ()
    return status.waiting(f"self-test of {', '.join(kernels)}", bool(kernels) and not quiet)

"""Joins the processes of a run, of which the first alone prints."""

import contextlib
import os
from collections.abc import Iterator

import jax

from kvrt.cli.mesh_options import AUTO, MeshFlags
from kvrt.engine.mesh import MeshSpec
from kvrt.errors import BadConfig, KvrtError, UsageError


def mesh(options: MeshFlags) -> MeshSpec | None:
    """The mesh that the flags mean.

    Raises:
      UsageError: an axis that does not exist, or a size below one.
    """
    try:
        return None if options.mesh is None else MeshSpec.parse(options.mesh)
    except BadConfig as error:
        raise UsageError(f"--mesh: {error}") from error


@contextlib.contextmanager
def joined(options: MeshFlags) -> Iterator[None]:
    """Meets the other processes, if there are any, and says nothing in any but the first.

    What ends another process is told after all, for it leaves this block.

    Raises:
      UsageError: the mesh makes no sense.
      KvrtError: the processes do not find each other.
    """
    mesh(options)
    if options.coordinator is None:
        yield
        return
    _meet(options)
    try:
        if jax.process_index() == 0:
            yield
            return
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield
    finally:
        jax.distributed.shutdown()


def _meet(options: MeshFlags) -> None:
    # What processes on the CPU talk by; other devices have ways of their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if options.coordinator == AUTO:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(options.coordinator, options.n_processes, options.process_id)
    except (ValueError, RuntimeError) as error:
        found = str(error).partition("\n")[0]
        raise KvrtError(
            f"the processes do not meet at --coordinator {options.coordinator}: {found}; check "
            "that all are started with the same flags"
        ) from error

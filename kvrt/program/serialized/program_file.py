"""A compiled program in a file, which is read without tracing or lowering.

JAX's persistent cache knows a program by its lowered text: to trace and lower the default model's
programs takes a start twice as long as to load them. A file is never needed: one that is damaged
or that XLA refuses is removed.
"""

import contextlib
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import jax
import xxhash
from jax.experimental import serialize_executable

from kvrt.errors import reason
from kvrt.files import regular
from kvrt.files.atomic import temporary

_N_CHECK = 16  # bytes of xxh3-128 before the rest
_MOST = 256  # files; the oldest go
# JAX's cache, beside which programs are kept; None where none are.
jax_folder: Path | None = None


def keep_beside(folder: Path) -> None:
    """Keeps programs below a folder while it is that of JAX's cache; its files are executed."""
    global jax_folder
    jax_folder = folder


def folder_of_programs() -> Path | None:
    """Where programs are kept; None where none are."""
    config: Any = jax.config
    if jax_folder is None or not config.jax_enable_compilation_cache:
        return None
    is_same = config.jax_compilation_cache_dir == str(jax_folder)
    return jax_folder / "kvrt_programs" if is_same else None


class ProgramFile:
    """A compiled program on the disk.

    Where it `is_there`, `outputs` has the shapes of its results.
    """

    def __init__(self, path: Path, device: Any):
        """Reads the file; loads nothing yet."""
        self._path, self._device = path, device
        held = self._read()
        self.is_there = held is not None
        self._args, self.outputs, self._program = held or (None, None, b"")

    def load(self) -> jax.stages.Compiled | None:
        """The program; None where there is none, or it is no use."""
        if not self.is_there:
            return None
        trees = jax.tree.structure(self._args), jax.tree.structure(self.outputs)
        where = self._device.client, [self._device]
        try:
            return serialize_executable.deserialize_and_load(self._program, *trees, *where)
        # XLA, JAX and the pickles of JAX's classes fail in ways of their own.
        except Exception as error:
            self._drop(str(error).partition("\n")[0])
            return None

    def save(self, compiled: jax.stages.Compiled, outputs: Any) -> None:
        """Writes the program, where it can be written.

        Args:
          compiled: the program.
          outputs: shapes of its results.
        """
        try:
            program, args, _ = serialize_executable.serialize(compiled)
            args = jax.tree.unflatten(args, [0] * args.num_leaves)
            data = pickle.dumps((args, jax.tree.map(_bare, outputs), program))
        # A backend or a program that cannot be serialized is compiled at each start.
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            return
        new = temporary(self._path)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                new.write_bytes(xxhash.xxh3_128(data).digest() + data)
                os.replace(new, self._path)
                held = sorted(self._path.parent.iterdir(), key=lambda x: x.stat().st_mtime)
                for path in held[:-_MOST]:
                    path.unlink()
            finally:
                new.unlink(missing_ok=True)

    def _read(self) -> tuple[Any, Any, bytes] | None:
        """Arguments, shapes of results, the program; None where there is no file of use."""
        try:
            with regular.open_file(self._path) as file:
                data = file.read()
            with contextlib.suppress(OSError):
                os.utime(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._drop(f"cannot be read: {reason(error)}")
            return None
        check, data = data[:_N_CHECK], data[_N_CHECK:]
        if xxhash.xxh3_128(data).digest() != check:
            self._drop("damaged")
            return None
        return pickle.loads(data)

    def _drop(self, why: str) -> None:
        warnings.warn(f"{self._path}: {why}; this program is compiled again", stacklevel=3)
        with contextlib.suppress(OSError):
            self._path.unlink()


def _bare(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)

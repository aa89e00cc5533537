"""The digest of a program: of everything that tracing and compiling it read.

Equal digests are equal programs, so a digest has the values that the program is traced for, its
arguments' shapes, JAX's settings, the sources of kvrt and kvrt_models, versions, device and
processor. Values that name other code have none: a decoder of one's own is traced at each start.
"""

import functools
import hashlib
import importlib.util
import io
import os
import pickle
import platform
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from kvrt.attention.choice.verdicts import machine
from kvrt.files.class_source import python_digest

_OURS = ("kvrt", "kvrt_models")
# Packages whose code is in the digest, by its source or by its version.
_KNOWN = frozenset({*_OURS, "builtins", "flax", "functools", "jax", "jaxlib", "ml_dtypes", "numpy"})
# Lines of /proc/cpuinfo that compilers of this processor follow.
_PROCESSOR = ("model name", "flags", "Features", "CPU implementer", "CPU part")


def values_digest(values: Any) -> str | None:
    """A digest of values, hexadecimal; None where they cannot be pickled or name unknown code."""
    try:
        data = pickle.dumps(values)
        _Known(io.BytesIO(data)).load()
    except (pickle.PickleError, AttributeError, TypeError, RecursionError):
        return None
    return hashlib.sha256(data).hexdigest()


def program_digest(values: Any, device: Any) -> str | None:
    """The digest of a program that a device runs and that follows from values; as `values_digest`.

    JAX's settings count as they are in this thread.
    """
    found = values_digest(values)
    settings = sorted(jax.config.values.items(), key=lambda x: x[0])
    parts = found, settings, _environment(device)
    return found and hashlib.sha256(repr(parts).encode()).hexdigest()


class _Known(pickle.Unpickler):
    """Refuses names of packages whose code is in no digest."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _KNOWN:
            raise pickle.UnpicklingError(f"the source of {module}.{name} is not known")
        return super().find_class(module, name)


@functools.cache
def _environment(device: Any) -> str:
    """What programs of this process depend on beside their own values."""
    found = (importlib.util.find_spec(package) for package in _OURS)
    folders = [Path(x.origin).parent for x in found if x is not None and x.origin is not None]
    versions = platform.python_version(), np.__version__, flax.__version__
    parts = machine(device), str(device), versions, _processor(), os.cpu_count()
    return repr((*parts, python_digest(folders)))


def _processor() -> list[str]:
    """What there is to know of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    return sorted({x for x in lines if x.startswith(_PROCESSOR)})

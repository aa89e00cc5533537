"""How attention can be computed, by name, and on what."""

import functools
import importlib
from collections.abc import Callable

from kvrt.arrays import Array
from kvrt.attention import reference, xla
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView
from kvrt.errors import NoKernel

# Output and log-sum-exp of the four arguments of `kvrt.attention.attend`, on one device.
AttendFunction = Callable[[TokenQKV, LayerKV, AnyView, LayerAttention], tuple[Array, Array]]


def _xla() -> AttendFunction:
    return xla.attend


def _reference() -> AttendFunction:
    return reference.attend


def load_kernel(module: str, *, interpret: bool = False) -> AttendFunction:
    """The kernel "gpu" or "tpu" of `kvrt.attention.pallas`; interpreted, it is XLA operations."""
    # Imported when it is asked for: Pallas takes 0.4 s, a tenth of a start.
    of_room = importlib.import_module("kvrt.attention.pallas.attend")
    made = importlib.import_module(f"kvrt.attention.pallas.{module}").kernel(interpret=interpret)
    return functools.partial(of_room.attend, made)


IMPLEMENTATIONS: dict[str, Callable[[], AttendFunction]] = {
    "chunked": _xla,
    "reference": _reference,
    "pallas_gpu": functools.partial(load_kernel, "gpu"),
    "pallas_tpu": functools.partial(load_kernel, "tpu"),
}
# Those that run on some platforms only; JAX calls both CUDA and ROCm "gpu".
_PLATFORMS = {"pallas_gpu": ("cuda", "rocm", "gpu"), "pallas_tpu": ("tpu",)}


def register(name: str, make: Callable[[], AttendFunction]) -> None:
    """Adds an implementation of one's own, which `CacheConfig.attention` may name from then on.

    Raises:
      NoKernel: the name is taken.
    """
    if name in IMPLEMENTATIONS:
        raise NoKernel(f"attention {name!r} exists already; choose another name")
    IMPLEMENTATIONS[name] = make


def implementation(name: str) -> AttendFunction:
    """The function of that name.

    Raises:
      NoKernel: it does not exist.
    """
    _check(name)
    return IMPLEMENTATIONS[name]()


def require(name: str, platform: str) -> None:
    """Refuses an implementation that a device of this platform cannot run.

    `implementation` does not ask, for a program may be compiled for another machine.

    Raises:
      NoKernel: it does not exist, or not for this platform.
    """
    _check(name)
    platforms = _PLATFORMS.get(name, (platform,))
    if platform not in platforms:
        on = " or ".join(platforms[:2])
        raise NoKernel(f"attention {name!r} runs on {on}, not on {platform}; use 'chunked'")


def _check(name: str) -> None:
    if name not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise NoKernel(f"attention {name!r} does not exist; one of {names}")

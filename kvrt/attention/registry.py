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


def _kernel(module: str, *, interpret: bool = False) -> AttendFunction:
    # Imported when it is asked for: Pallas takes 0.4 s, a tenth of a start.
    of_room = importlib.import_module("kvrt.attention.pallas.attend")
    kernel = importlib.import_module(f"kvrt.attention.pallas.{module}").kernel(interpret=interpret)
    return functools.partial(of_room.attend, kernel)


IMPLEMENTATIONS: dict[str, Callable[[], AttendFunction]] = {
    "chunked": _xla,
    "reference": _reference,
    "pallas_gpu": functools.partial(_kernel, "gpu"),
    "pallas_gpu_interpret": functools.partial(_kernel, "gpu", interpret=True),
    "pallas_tpu": functools.partial(_kernel, "tpu"),
    "pallas_tpu_interpret": functools.partial(_kernel, "tpu", interpret=True),
}
# Those that run on some platforms only; JAX calls both CUDA and ROCm "gpu".
_PLATFORMS = {"pallas_gpu": ("cuda", "rocm", "gpu"), "pallas_tpu": ("tpu",)}


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
        raise NoKernel(
            f"attention {name!r} runs on {on}, not on {platform}; "
            f"use 'chunked', or '{name}_interpret' to test it"
        )


def _check(name: str) -> None:
    if name not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise NoKernel(f"attention {name!r} does not exist; one of {names}")

"""How attention can be computed, by name, and on what."""

import functools
import importlib
from collections.abc import Callable
from typing import NoReturn

import jax

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
    """The kernel "gpu", "tpu" or "mosaic" of `kvrt.attention.pallas`.

    Raises:
      NoKernel: this JAX, or the device, is too old for it.
    """
    # Imported when it is asked for: Pallas takes 0.4 s, a tenth of a start.
    of_room = importlib.import_module("kvrt.attention.pallas.attend")
    made = importlib.import_module(f"kvrt.attention.pallas.{module}").kernel(interpret=interpret)
    return functools.partial(of_room.attend, made)


IMPLEMENTATIONS: dict[str, Callable[[], AttendFunction]] = {
    "chunked": _xla,
    "reference": _reference,
    "pallas_gpu": functools.partial(load_kernel, "gpu"),
    "pallas_tpu": functools.partial(load_kernel, "tpu"),
    "mosaic_gpu": functools.partial(load_kernel, "mosaic"),
}
# Those that read what sequences share once for all of them (`SeqView.shared`).
_READS_SHARED = set(IMPLEMENTATIONS)
# Those that run on some platforms only, in the order in which "auto" tries them; JAX calls both
# CUDA and ROCm "gpu".
_PLATFORMS = {
    "pallas_gpu": ("cuda", "rocm", "gpu"),
    "pallas_tpu": ("tpu",),
    "mosaic_gpu": ("cuda", "gpu"),
}
# What a config may say in place of a name: `kvrt.attention.choice` finds one.
AUTO = "auto"
# What runs wherever XLA does.
ANYWHERE = "chunked"


def register(name: str, make: Callable[[], AttendFunction], *, reads_shared: bool = False) -> None:
    """Adds an implementation of one's own, which `CacheConfig.attention` may name from then on.

    "auto" never takes it.

    Args:
      name: what a config calls it.
      make: gives the function, when it is asked for.
      reads_shared: whether it reads `SeqView.shared` as well; else an engine refuses shared reads.

    Raises:
      NoKernel: the name is taken.
    """
    if name in (AUTO, *IMPLEMENTATIONS):
        raise NoKernel(f"attention {name!r} exists already; choose another name")
    IMPLEMENTATIONS[name] = make
    if reads_shared:
        _READS_SHARED.add(name)


def reads_shared(name: str) -> bool:
    """Whether it reads what sequences share once for all of them."""
    return name in _READS_SHARED


def implementation(name: str) -> AttendFunction:
    """The function of that name.

    Raises:
      NoKernel: it does not exist, or is still to be chosen.
    """
    _check(name)
    return IMPLEMENTATIONS[name]()


def require(name: str, platform: str) -> None:
    """Refuses an implementation that a device of this platform cannot run.

    `implementation` does not ask, for a program may be compiled for another machine. "auto" finds
    one for every platform.

    Raises:
      NoKernel: it does not exist, or not for this platform, or this JAX or the device is too old.
    """
    if name == AUTO:
        return
    _check(name, AUTO)
    platforms = _PLATFORMS.get(name, (platform,))
    if platform not in platforms:
        on = " or ".join(x for x in platforms if x != "gpu")
        raise NoKernel(f"attention {name!r} runs on {on}, not on {platform}; use 'chunked'")
    if name in _PLATFORMS:
        IMPLEMENTATIONS[name]()


def kernels(platform: str) -> tuple[str, ...]:
    """What "auto" tries on a platform, the best first."""
    found = [name for name, platforms in _PLATFORMS.items() if platform in platforms]
    # Measured on an H100: docs/accelerators.md.
    return tuple(sorted(found, key=lambda name: name != "mosaic_gpu" or not _is_hopper()))


def _is_hopper() -> bool:
    """Whether JAX's first device is a GPU of NVIDIA's Hopper generation."""
    device = jax.devices()[0]
    return device.platform == "gpu" and str(device.compute_capability) == "9.0"


def check_chosen(name: str) -> None:
    """Refuses "auto" where nobody chooses any more.

    Raises:
      NoKernel: it is that.
    """
    if name == AUTO:
        raise NoKernel(
            f"attention {AUTO!r} is chosen where a Runtime or an Engine is made; name one here, "
            f"e.g. {ANYWHERE!r}"
        )


def _check(name: str, *others: str) -> None:
    if name not in IMPLEMENTATIONS:
        _refuse(name, *others)


def _refuse(name: str, *others: str) -> NoReturn:
    """Raises; `others` are what may be said in place of a name."""
    check_chosen(name)
    names = ", ".join((*others, *IMPLEMENTATIONS))
    raise NoKernel(f"attention {name!r} does not exist; one of {names}")

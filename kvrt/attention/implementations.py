"""How attention can be computed, by name, and on what."""

import functools
import importlib
from collections.abc import Callable

from kvrt.arrays import Array
from kvrt.attention import pallas_attend
from kvrt.attention.chunked import attend_chunked
from kvrt.attention.reference import attend_reference, attend_rows_reference
from kvrt.attention.rows import attend_rows
from kvrt.errors import NoKernel

# Attention over a list of blocks that all tokens share, and of rows with lists of their own.
Pair = tuple[Callable[..., tuple[Array, Array]], Callable[..., tuple[Array, Array]]]


def _plain() -> Pair:
    return attend_chunked, attend_rows


def _reference() -> Pair:
    return attend_reference, attend_rows_reference


def _kernel(module: str, *, interpret: bool = False) -> Pair:
    # Imported when it is asked for: Pallas takes 0.4 s, a tenth of a start.
    kernel = importlib.import_module(f"kvrt.attention.{module}").kernel(interpret=interpret)
    of_list, of_rows = (
        functools.partial(f, kernel) for f in (pallas_attend.attend_list, pallas_attend.attend_rows)
    )
    return of_list, of_rows


IMPLEMENTATIONS: dict[str, Callable[[], Pair]] = {
    "chunked": _plain,
    "reference": _reference,
    "pallas_gpu": functools.partial(_kernel, "pallas_gpu"),
    "pallas_gpu_interpret": functools.partial(_kernel, "pallas_gpu", interpret=True),
    "pallas_tpu": functools.partial(_kernel, "pallas_tpu"),
    "pallas_tpu_interpret": functools.partial(_kernel, "pallas_tpu", interpret=True),
}
# Those that run on some platforms only; JAX calls both CUDA and ROCm "gpu".
_PLATFORMS = {"pallas_gpu": ("cuda", "rocm", "gpu"), "pallas_tpu": ("tpu",)}


def named(implementation: str) -> Pair:
    """The functions of an implementation: for one list of blocks, and for rows with lists.

    Raises:
      NoKernel: it does not exist.
    """
    _check(implementation)
    return IMPLEMENTATIONS[implementation]()


def require(implementation: str, platform: str) -> None:
    """Refuses an implementation that a device of this platform cannot run.

    `named` does not ask, for a program may be compiled for another machine.

    Raises:
      NoKernel: it does not exist, or not for this platform.
    """
    _check(implementation)
    platforms = _PLATFORMS.get(implementation, (platform,))
    if platform not in platforms:
        on = " or ".join(platforms[:2])
        raise NoKernel(
            f"attention {implementation!r} runs on {on}, not on {platform}; "
            f"use 'chunked', or '{implementation}_interpret' to test it"
        )


def _check(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise NoKernel(f"attention {implementation!r} does not exist; one of {names}")

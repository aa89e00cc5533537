"""Keeps JAX from waiting for a TPU that this machine does not have."""

import os
import sys
from pathlib import Path

_DEV, _PCI = Path("/dev"), Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# PCI classes of Google's virtual disks and network cards, which any machine of its cloud has.
_NOT_TPU = ("0x01", "0x02")


def leave_out_libtpu() -> None:
    """Hides an installed libtpu from JAX where there is no TPU; before JAX is imported.

    JAX loads libtpu wherever it finds it, which then looks for its machine's metadata and logs
    what it lacks. It may be there for compiling ahead alone. Who sets JAX_PLATFORMS or
    TPU_LIBRARY_PATH decides for themselves.
    """
    if "JAX_PLATFORMS" in os.environ or "TPU_LIBRARY_PATH" in os.environ or has_tpu():
        return
    # Python's own way to say that a module is not there: other backends are found as ever.
    sys.modules["libtpu"] = None  # pyright: ignore[reportArgumentType]


def has_tpu(dev: Path = _DEV, pci: Path = _PCI) -> bool:
    """Whether a TPU is attached, by the devices that the system lists; nothing is opened."""
    return any(dev.glob("accel[0-9]*")) or any(map(_is_tpu, pci.glob("*")))


def _is_tpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _GOOGLE and not kind.startswith(_NOT_TPU)

"""What a machine is: device, driver, versions, clocks, free disk, and which kvrt this is."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import xxhash

from scripts.gpu_day.plan import ROOT

_CLOCKS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
_LEAST_DISK_BYTES = 2 << 30


def describe(found: dict[str, Any], out: Path, *, smoke: bool) -> dict[str, Any]:
    """What results belong to, and what else a reader of them wants to know.

    Args:
      found: what a process in JAX says.
      out: where results go.
      smoke: whether shapes are tiny.
    """
    return {
        **found,
        **clocks(),
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "sources": sources(),
        "smoke": smoke,
        "free_disk_bytes": shutil.disk_usage(out).free,
    }


def refusal(machine: dict[str, Any]) -> str | None:
    """Why nothing is measured here, None where all is well."""
    if machine["backend"] == "cpu" and not machine["smoke"]:
        return (
            "JAX finds no GPU and no TPU, only a CPU; install JAX for the device "
            "(pip install 'jax[cuda13]'), or try the script out with --smoke"
        )
    if machine["free_disk_bytes"] < _LEAST_DISK_BYTES:
        free = machine["free_disk_bytes"] / 2**30
        return f"{free:.1f} GiB of disk are free, 2 are needed for compiled programs and results"
    return None


def sources() -> str:
    """A digest of what is measured, for a commit says nothing of changes that are not in it."""
    digest = xxhash.xxh3_64()
    for folder in ("kvrt", "models"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def clocks() -> dict[str, str]:
    """Driver, clocks, limit of power and temperature of the first NVIDIA GPU, where readable."""
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"clocks": "not readable"}
    values = done.stdout.strip().split(", ")
    return dict(zip(_CLOCKS.split(","), values, strict=False))


def _git(*args: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()

"""What a machine is: device, driver, versions, clocks, free disk, and which kvrt this is.

    python -m scripts.gpu_day.machine

A line of JSON, of a process of its own, so that a day's own process never holds the device.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import xxhash

from scripts._lib import implementations, measure
from scripts.gpu_day.plan import ROOT

_CLOCKS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
_LEAST_DISK_BYTES = 2 << 30


def describe(out: Path, env: Mapping[str, str], *, smoke: bool) -> dict[str, Any]:
    """What results belong to, and what else a reader of them wants to know.

    Args:
      out: where results go.
      env: of the process that looks.
      smoke: whether shapes are tiny.

    Raises:
      subprocess.CalledProcessError: JAX does not start.
    """
    command = [sys.executable, "-m", "scripts.gpu_day.machine"]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    free = shutil.disk_usage(out).free
    return {**found, **clocks(), "sources": sources(), "smoke": smoke, "free_disk_bytes": free}


def refusal(machine: Mapping[str, Any]) -> str | None:
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


def main() -> None:
    names, where = implementations.running(), measure.where()
    backend = jax.default_backend()
    gpu = "rocm" if "rocm" in where["platform"].lower() else "cuda"
    found = {
        **where,
        "backend": gpu if backend == "gpu" else backend,
        "n_devices": jax.device_count(),
        "tiled": [x for x in names if implementations.tile_choices(x)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

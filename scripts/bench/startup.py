"""Time from starting `kvrt run` to its first token, in new processes, compiled programs kept.

    python -m scripts.bench.startup
    python -m scripts.bench.startup --phases

The first start of each round has an empty folder of compiled programs, the others find what it
left. With --phases also what the time of a later start goes to.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from kvrt_models import hub
from scripts._lib import measure

_N_STARTS = flags.DEFINE_integer("starts", 5, "Starts after the first.", lower_bound=1)
_PHASES = flags.DEFINE_boolean("phases", False, "Time the phases of later starts, too.")

_COMMAND = "from kvrt.__main__ import enter; enter()"
_TIMED = "from scripts.bench.start_phases import run; run()"
_ARGUMENTS = ["run", "-p", "Once upon a time", "-n", "2", "--temp", "0"]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    hub.resolve("smollm2-135m")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(hub.cache_dir() / "models")
        environment = {**os.environ, "KVRT_CACHE": folder}
        samples = [first_token(environment) for _ in range(_N_STARTS.value + 1)]
        found = [phases(environment) for _ in range(_N_STARTS.value if _PHASES.value else 0)]
    later = measure.quartiles(samples[1:], scale=1, digits=2)
    measure.emit("startup", first_s=round(samples[0], 2), later_s=later)
    if found:
        medians = {name: round(float(np.median([x[name] for x in found])), 3) for name in found[0]}
        measure.emit("startup phases", s=medians)


def first_token(environment: dict[str, str]) -> float:
    """Seconds until the first byte of text."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *_ARGUMENTS],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise RuntimeError("kvrt run wrote nothing; run it by hand to see why")
        seconds = time.perf_counter() - start
        process.stdout.read()
    return seconds


def phases(environment: dict[str, str]) -> dict[str, float]:
    """Seconds of each phase of one start, in their order."""
    done = subprocess.run(
        [sys.executable, "-c", _TIMED, *_ARGUMENTS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stderr.splitlines()[-1])


if __name__ == "__main__":
    app.run(main)

"""Time from starting `kvrt run` to its first token, in new processes, compiled programs kept.

Run it with `python -m scripts.bench.startup`. The first start of each round has an empty folder of
compiled programs, the others find what it left.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from kvrt_models import hub
from scripts._lib import measure

_N_STARTS = flags.DEFINE_integer("starts", 5, "Starts after the first.", lower_bound=1)

_COMMAND = "from kvrt.cli.main import run; run()"
_ARGUMENTS = ["run", "-p", "Once upon a time", "-n", "2", "--temp", "0"]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    hub.resolve("smollm2-135m")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(hub.cache_dir() / "models")
        environment = {**os.environ, "KVRT_CACHE": folder}
        samples = [first_token(environment) for _ in range(_N_STARTS.value + 1)]
    later = measure.quartiles(samples[1:], scale=1, digits=2)
    measure.emit("startup", first_s=round(samples[0], 2), later_s=later)


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


if __name__ == "__main__":
    app.run(main)

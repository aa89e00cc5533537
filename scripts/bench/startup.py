"""Time from a command to its first token, in new processes: `kvrt run`, and llama.cpp beside it.

    python -m scripts.bench.startup
    python -m scripts.bench.startup --phases

Both read the same file; llama.cpp (through xllamacpp) keeps its types of weights. The first start
finds an empty cache folder: it quantizes and compiles. Each round has one later start and one of
llama.cpp. --phases adds what the time of a later start goes to. Modules are compiled to bytecode
before, as an installation does.
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
from absl import flags

from kvrt_models import hub
from scripts._lib import commands, measure

_N_STARTS = flags.DEFINE_integer("starts", 5, "Starts after the first.", lower_bound=1)
_PHASES = flags.DEFINE_boolean("phases", False, "Time the phases of later starts, too.")

_PROMPT = "Once upon a time"
_KVRT = "from kvrt.__main__ import enter; enter()"
_TIMED = "from scripts.bench.start_phases import run; run()"
_ARGUMENTS = ("run", "-p", _PROMPT, "-n", "2", "--temp", "0")
_LLAMA = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity = sys.argv[1], 8192, 1, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
params.fit_params = params.ui = params.warmup = False
request = {"prompt": sys.argv[3], "max_tokens": 1, "temperature": 0.0}
print(xllamacpp.Server(params).handle_completions(request)["choices"][0]["text"], flush=True)
"""


def main() -> None:
    llama = (_LLAMA, str(hub.resolve("smollm2-135m")), str(os.cpu_count()), _PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(hub.cache_dir() / "models")
        environment = {**os.environ, "KVRT_CACHE": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        warm = "import kvrt.cli.run.run_command, xllamacpp, scripts.bench.start_phases"
        subprocess.run([sys.executable, "-c", warm], env=environment, check=True)
        first = first_token((_KVRT, *_ARGUMENTS), environment)
        later, peer, found = [], [], []
        for _ in range(_N_STARTS.value):
            later.append(first_token((_KVRT, *_ARGUMENTS), environment))
            peer.append(first_token(llama, environment))
            if _PHASES.value:
                found.append(phases(environment))
    both = {"later_s": later, "llama_cpp_s": peer}
    quartiles = {name: measure.quartiles(x, scale=1, digits=2) for name, x in both.items()}
    measure.emit("startup", first_s=round(first, 2), **quartiles)
    if found:
        medians = {name: round(float(np.median([x[name] for x in found])), 3) for name in found[0]}
        measure.emit("startup phases", s=medians)


def first_token(program: Sequence[str], environment: dict[str, str]) -> float:
    """Seconds until a program, and its arguments, writes its first byte of text."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", *program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise RuntimeError(f"it wrote nothing, run it by hand to see why: {program}")
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
    commands.run(main)

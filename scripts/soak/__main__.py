"""Runs the tests' state machines and matrix cells for as long as one likes, as users have them.

    python -m scripts.soak --minutes 10
    python -m scripts.soak --minutes 60 --ledger soak.json
    python -m scripts.soak --seed 7 --only runtime-write/3
    python -m scripts.soak --only matrix/none-runtime-read-f32-full-one-xla-plain

In tests a machine has 2 to 60 histories of 15 to 30 steps, and most modules compile without
optimisations, on an older code generator where JAX still has it. Here histories have up to 50
steps, and programs are compiled as users have them; each is searched for two defects of jaxlib
0.10.2 (tests/xla_defects.py). The work is cut into units: 25 histories of a machine, 200 where it
runs no program, or four cells of the matrix, those with most triples of values that were not tried
yet. The next one is of whatever has had least of the time. What a unit draws follows from --seed
and its name, so that --only repeats it. With --ledger, counts are added up in a file, and the next
run with the same file goes on where this one ended; one that is killed loses the unit it was in.

One JSON line a unit, and one of all counts at the end. A unit that fails is printed with its
shortest history and the command that repeats it; the others go on, and the exit code is 1.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import app, flags

from scripts._lib import measure
from scripts.soak import ledger as ledgers
from scripts.soak import units

_MINUTES = flags.DEFINE_float("minutes", 5.0, "How long to go on.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "What is drawn.", lower_bound=0)
_LEDGER = flags.DEFINE_string("ledger", None, "File of counts to go on from; made if missing.")
_ONLY = flags.DEFINE_list("only", [], "Machines or units; 'matrix' is one. All without it.")
_MESH = flags.DEFINE_boolean("mesh", False, "Cells of a mesh as well.")
_SHIPPED = flags.DEFINE_boolean("shipped", True, "Programs are optimised, as users have them.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        wanted = units.Wanted.parse(_ONLY.value)
        ledger = _opened()
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    if _MESH.value:  # XLA reads it when its first program is compiled
        flag = "--xla_force_host_platform_device_count=4"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    jax.config.update("jax_platforms", "cpu")
    # As in the tests.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", not _SHIPPED.value)
    if _SHIPPED.value:
        units.search_programs()
    print(f"soak: seed {ledger.seed}", file=sys.stderr, flush=True)
    end = time.perf_counter() + 60 * _MINUTES.value
    n_failed = len(ledger.failures)
    for unit in units.in_turn(ledger, wanted, lambda: time.perf_counter() >= end):
        # What was asked for by name is run whole.
        _run(unit, ledger, lambda u=unit: u not in wanted.units and time.perf_counter() >= end)
        if _LEDGER.value:
            ledgers.save(Path(_LEDGER.value), ledger)
    measure.emit("soak", seed=ledger.seed, **units.summary(ledger))
    sys.exit(1 if len(ledger.failures) > n_failed else 0)


def _opened() -> ledgers.Ledger:
    """The ledger to go on from, or a new one.

    Raises:
      ValueError: it is of another seed, or no ledger.
    """
    path = Path(_LEDGER.value) if _LEDGER.value else None
    if path is None or not path.exists():
        return ledgers.Ledger(seed=_SEED.value)
    ledger = ledgers.read(path)
    if flags.FLAGS["seed"].present and ledger.seed != _SEED.value:
        raise ValueError(
            f"{path} is of seed {ledger.seed}, not of {_SEED.value}; leave --seed out or name "
            "another file"
        )
    return ledger


def _run(unit: str, ledger: ledgers.Ledger, is_over: Callable[[], bool]) -> None:
    start = time.perf_counter()
    task = units.Task(unit, ledger, is_over)
    counts, wrong = task.run(with_mesh=_MESH.value)
    seconds = round(time.perf_counter() - start, 1)
    ledger.note(unit, counts, seconds, wrong)
    commit = measure.where()["commit"]
    if commit not in ledger.commits:
        ledger.commits.append(commit)
    found = {"unit": unit, "seed": ledger.seed, **counts, "seconds": seconds}
    if wrong:
        again = f"python -m scripts.soak --seed {ledger.seed} --only {task.again}"
        again += " --mesh" * _MESH.value + " --noshipped" * (not _SHIPPED.value)
        found["again"] = again
        print(f"{wrong}\n{unit} failed; again:\n    {again}", file=sys.stderr, flush=True)
    measure.emit("soak unit", **found)


if __name__ == "__main__":
    app.run(main)

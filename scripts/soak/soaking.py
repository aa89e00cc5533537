"""A soak: units one after the other until the time is over, with a line and a count for each."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from scripts._lib import measure
from scripts.soak import ledger as ledgers
from scripts.soak import units


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for.

    Attributes:
      minutes: after which no history begins; units that were asked for by name are run whole.
      seed: of what is drawn; None takes the ledger's, or 0.
      ledger: file of counts to go on from.
      wanted: machines and units.
      with_mesh: cells of a mesh as well.
      shipped: programs are optimised, as users have them.
      whole: a step whose config leaves it open is one program.
    """

    minutes: float
    wanted: units.Wanted
    seed: int | None = None
    ledger: Path | None = None
    with_mesh: bool = False
    shipped: bool = True
    whole: bool = False


def run(options: Options) -> int:
    """Runs units until the time is over; how many failed.

    Raises:
      ValueError: the ledger is of another seed, or no ledger.
    """
    ledger = _opened(options)
    _set_up(options)
    print(f"soak: seed {ledger.seed}", file=sys.stderr, flush=True)
    end, n_failed = time.perf_counter() + 60 * options.minutes, len(ledger.failures)

    def is_over() -> bool:
        return time.perf_counter() >= end

    for unit in units.in_turn(ledger, options.wanted, is_over):
        whole = unit in options.wanted.units
        _run(unit, ledger, options, (lambda: False) if whole else is_over)
        if options.ledger is not None:
            ledgers.save(options.ledger, ledger)
    measure.emit("soak", seed=ledger.seed, **units.summary(ledger))
    return len(ledger.failures) - n_failed


def _opened(options: Options) -> ledgers.Ledger:
    """The ledger to go on from, or a new one."""
    if options.ledger is None or not options.ledger.exists():
        return ledgers.Ledger(seed=options.seed or 0)
    ledger = ledgers.read(options.ledger)
    if options.seed not in (None, ledger.seed):
        raise ValueError(
            f"{options.ledger} is of seed {ledger.seed}, not of {options.seed}; leave --seed out "
            "or name another file"
        )
    return ledger


def _set_up(options: Options) -> None:
    if options.with_mesh:  # XLA reads it when its first program is compiled
        flag = "--xla_force_host_platform_device_count=4"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    jax.config.update("jax_platforms", "cpu")
    # As in the tests.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", not options.shipped)
    if options.shipped:
        units.search_programs()
    if options.whole:
        units.run_whole()


def _run(unit: str, ledger: ledgers.Ledger, options: Options, is_over: Callable[[], bool]) -> None:
    """Runs a unit, adds it to the ledger and prints its line."""
    start = time.perf_counter()
    task = units.Task(unit, ledger, is_over)
    counts, wrong = task.run(with_mesh=options.with_mesh)
    seconds = round(time.perf_counter() - start, 1)
    ledger.note(unit, counts, seconds, wrong)
    commit = measure.where()["commit"]
    if commit not in ledger.commits:
        ledger.commits.append(commit)
    found = {"unit": unit, "seed": ledger.seed, **counts, "seconds": seconds}
    if wrong:
        again = f"python -m scripts.soak --seed {ledger.seed} --only {task.again}"
        again += " --mesh" * options.with_mesh + " --noshipped" * (not options.shipped)
        again += " --whole" * options.whole
        found["again"] = again
        print(f"{wrong}\n{unit} failed; again:\n    {again}", file=sys.stderr, flush=True)
    measure.emit("soak unit", **found)

"""Units of work: whose turn it is, what each draws, and how it is run."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator

import jax
import xxhash

from kvrt import CacheConfig, Decoder
from kvrt.program import device
from scripts.soak import grids, machines, matrix
from scripts.soak.ledger import Ledger
from tests import xla_defects

MATRIX = "matrix"
GRIDS = "grids"  # by name alone: it takes as long as it takes
IN_TURN = (*machines.MACHINES, MATRIX)
NAMES = (*IN_TURN, GRIDS)
# Histories of a unit by whether it runs programs, and steps of a history.
EXAMPLES, STEPS = {True: 25, False: 200}, 50
# Of the time, in parts: the matrix compiles most of it, machines on the host need less of it.
_SHARES = {MATRIX: 2.0} | {n: 1.0 if m.on_device else 0.5 for n, m in machines.MACHINES.items()}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What was asked for: machines one after the other, or units by name."""

    names: tuple[str, ...]
    units: tuple[str, ...] = ()

    @classmethod
    def parse(cls, only: list[str]) -> "Wanted":
        """Reads --only.

        Raises:
          ValueError: a name is none.
        """
        for item in only:
            name, _, rest = item.partition("/")
            if name not in NAMES:
                raise ValueError(f"--only={item}; machines are {', '.join(NAMES)}")
            if name == MATRIX and rest and not rest.isdigit():
                matrix.named(rest)
            elif rest and not rest.isdigit():
                raise ValueError(f"--only={item}; a unit is {name}/0, {name}/1 and so on")
        named = tuple(x for x in only if "/" in x or x == GRIDS)
        rest = tuple(x for x in only if x not in named)
        return cls(rest if only else IN_TURN, named)


def in_turn(ledger: Ledger, wanted: Wanted, is_over: Callable[[], bool]) -> Iterator[str]:
    """Names of units: those asked for by name, then by turns until the time is over."""
    yield from wanted.units
    order = sorted(wanted.names)
    random.Random(ledger.seed).shuffle(order)
    while order and not is_over():
        least = min(order, key=lambda name: ledger.seconds.get(name, 0) / _SHARES[name])
        yield ledger.next_unit(least)


class Task:
    """A unit that can be run."""

    def __init__(self, unit: str, ledger: Ledger, is_over: Callable[[], bool]):
        """Takes what it needs to know of those before it."""
        self.name, _, self._rest = unit.partition("/")
        self._ledger, self._is_over = ledger, is_over
        self.again = unit

    @property
    def seed(self) -> int:
        """What is drawn: follows from the soak's seed and the unit's name."""
        told = f"{self._ledger.seed}/{self.name}/{self._rest}"
        return xxhash.xxh3_64_intdigest(told.encode())

    def run(self, *, with_mesh: bool) -> tuple[Counter[str], str]:
        """What it did, and what was wrong, or ""."""
        if self.name == GRIDS:
            return grids.run()
        if self.name != MATRIX:
            machine = machines.MACHINES[self.name]
            budget = machines.Budget(EXAMPLES[machine.on_device], STEPS, self._is_over)
            return machines.run(machine, self.seed, budget)
        if not self._rest.isdigit():
            return Counter(cells=1), matrix.run_cell(matrix.named(self._rest))
        cells, wrong = matrix.run(self.seed, self._ledger.cells, with_mesh)
        self._ledger.cells += cells
        if wrong:
            self.again = f"{MATRIX}/{cells[-1]}"
        return Counter(cells=len(cells)), wrong


def summary(ledger: Ledger) -> dict[str, object]:
    """All counts: by machine, and together of those on the host and on the device."""
    where: dict[str, Counter[str]] = {"on_host": Counter(), "on_device": Counter()}
    for name, counts in ledger.counts.items():
        if name in machines.MACHINES:
            where["on_device" if machines.MACHINES[name].on_device else "on_host"].update(counts)
    return {
        "by_machine": {name: dict(of) for name, of in sorted(ledger.counts.items())},
        **{name: dict(of) for name, of in where.items()},
        "triples": matrix.n_triples(ledger.cells),
        "seconds": round(sum(ledger.seconds.values())),
        "failed": sorted(ledger.failures),
        "commits": ledger.commits,
    }


def search_programs() -> None:
    """Looks for the known defects of jaxlib in each program that is compiled from here on."""
    jax.stages.Lowered.compile = xla_defects.searched(jax.stages.Lowered.compile)


def run_whole() -> None:
    """Makes a step one program from here on, where a config leaves it open."""

    def dispatched(model: Decoder, config: CacheConfig, *, is_divided: bool) -> tuple[str, str]:
        if config.programs == "auto":
            config = dataclasses.replace(config, programs="whole")
        return chosen(model, config, is_divided=is_divided)

    chosen, device.dispatched = device.dispatched, dispatched

"""What was run so far: a file that a later run goes on from, written whole after each unit."""

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path

from kvrt.files import atomic


@dataclasses.dataclass
class Ledger:
    """Counts of a soak, by machine; "matrix" is one of them.

    Attributes:
      seed: of all of it; that of a unit follows from it and from the unit's name.
      n_units: begun of each machine, so that the next one draws other histories.
      seconds: spent with each.
      counts: histories and steps of each.
      cells: of the matrix that were run.
      failures: units that failed, and how.
      commits: that were run.
    """

    seed: int
    n_units: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    cells: list[str] = dataclasses.field(default_factory=list)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    commits: list[str] = dataclasses.field(default_factory=list)

    def next_unit(self, name: str) -> str:
        """The name of a machine's next unit, which counts as begun."""
        self.n_units[name] += 1
        return f"{name}/{self.n_units[name] - 1}"

    def note(self, unit: str, counts: Counter[str], seconds: float, wrong: str) -> None:
        """Adds what a unit did."""
        name = unit.split("/")[0]
        self.seconds[name] = self.seconds.get(name, 0) + seconds
        self.counts[name] = self.counts.get(name, Counter()) + counts
        if wrong:
            self.failures[unit] = wrong


def save(path: Path, ledger: Ledger) -> None:
    """Writes it whole, or not at all."""
    text = json.dumps(vars(ledger), indent=1)
    atomic.replace(path, lambda fd: _write_all(fd, text.encode()))


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def read(path: Path) -> Ledger:
    """Reads what `save` wrote.

    Raises:
      ValueError: it is no such file.
    """
    try:
        told = json.loads(path.read_text())
        made = Ledger(**told)
        made.n_units = Counter(made.n_units)
        made.counts = {name: Counter(of) for name, of in made.counts.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no ledger of a soak ({error}); name another file") from None
    return made

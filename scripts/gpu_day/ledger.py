"""The results file of a day: one JSON line a cell, appended when it is made; a run continues it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What a result belongs to: where one of these changed, all is measured anew.
IDENTITY = ("commit", "sources", "device", "platform", "jax", "jaxlib", "smoke")


class Ledger:
    """Results by name of their cell; the last line of a cell counts.

    `began` says why the file begins anew, "" where it does not.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], *, retry: bool = False):
        """Reads what an earlier run of the same identity has measured.

        Args:
          path: of the results file.
          run: what results belong to; `IDENTITY` of it decides.
          retry: what failed counts as not measured.
        """
        self._path, self.began = path, ""
        self.lines: dict[str, dict[str, Any]] = {}
        held = _read(path) if path.exists() else []
        before = held[0].get("run", {}) if held else {}
        changed = [name for name in IDENTITY if before.get(name) != run.get(name)]
        if held and not changed:
            self.lines = {x["cell"]: x for x in held[1:] if not (retry and "failed" in x)}
            return
        if path.exists():
            kept = _put_aside(path)
            what = ", ".join(f"{n} {before.get(n)} -> {run.get(n)}" for n in changed)
            self.began = f"begins anew, for {what}; {kept.name} has the results of before"
        self._append({"run": dict(run)})

    def add(self, cell: str, line: Mapping[str, Any]) -> dict[str, Any]:
        """Appends the result of a cell; it is on the disk when this returns."""
        found = {"cell": cell, **line}
        self._append(found)
        self.lines[cell] = found
        return found

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the torn one of a killed run is cut off, or the next would join it."""
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        with path.open("r+b") as file:
            file.truncate(end)
    return [json.loads(line) for line in whole[:end].splitlines()]


def _put_aside(path: Path) -> Path:
    n = 1
    while (kept := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists():
        n += 1
    path.rename(kept)
    return kept

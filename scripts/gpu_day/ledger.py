"""The results file of a day: the lines that commands print, as soon as they do; a run continues it.

A command is done when a line says so, with its seconds or why it failed: the lines of one that was
killed before count for nothing.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What results belong to: where one of these changed, all is measured anew.
IDENTITY = ("commit", "sources", "device", "platform", "jax", "jaxlib", "smoke")

Line = dict[str, Any]


class Ledger:
    """Lines by name of their command; `done` has the last line of those that ended.

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
        self.lines: dict[str, list[Line]] = {}
        self.done: dict[str, Line] = {}
        first, *held = _read(path) if path.exists() else [{}]
        before = first.get("run", {})
        changed = [name for name in IDENTITY if before.get(name) != run.get(name)]
        if first and not changed:
            for line in held:
                self._count(line)
            failed = [x for x, line in self.done.items() if "failed" in line] if retry else []
            for name in {*self.lines} - {*self.done} | {*failed}:
                self.forget(name)
            return
        if path.exists():
            kept = _put_aside(path)
            what = ", ".join(f"{n} {before.get(n)} -> {run.get(n)}" for n in changed)
            self.began = f"begins anew, for {what}; {kept.name} has the results of before"
        self._append({"run": dict(run)})

    def add(self, line: Line) -> None:
        """Appends a line of a command; it is on the disk when this returns."""
        self._append(line)
        self._count(line)

    def forget(self, name: str) -> None:
        """Counts no line of a command that is run again."""
        self.lines.pop(name, None)
        self.done.pop(name, None)

    def _count(self, line: Line) -> None:
        name = line["command"]
        if line.get("begins"):
            self.forget(name)
        elif "seconds" in line:
            self.done[name] = line
        else:
            self.lines.setdefault(name, []).append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> list[Line]:
    """All whole lines; the torn one of a killed run is cut off, or the next would join it."""
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        with path.open("r+b") as file:
            file.truncate(end)
    return [json.loads(line) for line in whole[:end].splitlines()] or [{}]


def _put_aside(path: Path) -> Path:
    n = 1
    while (kept := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists():
        n += 1
    path.rename(kept)
    return kept

"""Faults put into a copy of the tree, one at a time: which test of the default suite finds each.

    python -m scripts.soak.mutants
    python -m scripts.soak.mutants --only pages --programs /tmp/programs
    python -m scripts.soak.mutants --list

The faults stand in `faults.toml`, by room. Each replaces code that stands once in its file or,
where it was moved, in one other file. Its tests are files or folders of the default suite, quickest
first; the fault is found when one of them fails. Prints a line for each fault with the test that
found it, then what is not as it should be and the counts by room:

    MISSED  all of its tests pass
    STALE   its code or a test of it is gone, so that it could not be tried
    BROKEN  the test that found it fails on the tree as it is

Ends with 1 if there is one of these.
"""

import concurrent.futures
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import app, flags

_ONLY = flags.DEFINE_string("only", "", "Faults whose `room: name` begins so.")
_LIST = flags.DEFINE_boolean("list", False, "Only say where each fault goes and what finds it.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Faults tried at once.", lower_bound=1)
_PROGRAMS = flags.DEFINE_string(
    "programs", None, "Folder of compiled programs, kept for later runs; none keeps them for one."
)

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("faults.toml")
CODE = ("kvrt", "models")
COPIED = (*CODE, "tests", "scripts", "pyproject.toml", "README.md")
LIMIT_S = 900
PYTEST = ("-n", "0", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "first")


class Stale(Exception):
    """A fault that cannot be tried on this tree, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault.

    Attributes:
      room: part of kvrt that it is in.
      name: what it does wrong.
      path: file it is put into.
      old: code that stands there once.
      new: code in its place.
      tests: files and folders of tests that should find it, quickest first.
    """

    room: str
    name: str
    path: str
    old: str
    new: str
    tests: Sequence[str]

    def __str__(self) -> str:
        """Room and name."""
        return f"{self.room}: {self.name}"


def read_faults(only: str = "") -> list[Fault]:
    """The faults whose room and name begin with a text, in the order of the table."""
    rooms = tomllib.loads(TABLE.read_text())
    faults = [Fault(room=r, name=n, **x) for r, named in rooms.items() for n, x in named.items()]
    return [x for x in faults if str(x).startswith(only)]


def place(fault: Fault) -> str:
    """The file that a fault goes into: its own, or the one that its code was moved to.

    Raises:
      Stale: its code stands nowhere or more than once, or a test of it is gone.
    """
    gone = [x for x in fault.tests if not (ROOT / x).exists()]
    if gone:
        raise Stale(f"no {', '.join(gone)}; name the tests that took its place")
    if (ROOT / fault.path).exists() and (ROOT / fault.path).read_text().count(fault.old) == 1:
        return fault.path
    files = [x for folder in CODE for x in sorted((ROOT / folder).rglob("*.py"))]
    counts = {str(x.relative_to(ROOT)): x.read_text().count(fault.old) for x in files}
    found = [x for x, n in counts.items() if n]
    if sum(counts.values()) != 1:
        raise Stale(f"{fault.old!r} stands in {', '.join(found) or 'no file'}, not once")
    return found[0]


def failures(folder: Path, tests: Iterable[str], programs: str, *more: str) -> list[str]:
    """The tests that fail in a tree.

    Raises:
      Stale: pytest has nothing to run, or ends in another way.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), f"{folder}/models"])}
    words = [sys.executable, "-m", "pytest", *PYTEST, f"--programs={programs}", *more, *tests]
    done = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1) or bool(failed) != bool(done.returncode):
        raise Stale(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    return [x.split(" - ")[0].split(maxsplit=1)[1] for x in failed]


def first_failure(fault: Fault, programs: str) -> str:
    """The first test of a fault that fails on a copy of the tree with it, "" if all pass.

    Raises:
      Stale: as of `place` and `failures`.
    """
    path = place(fault)
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        code = Path(folder, path).read_text()
        Path(folder, path).write_text(code.replace(fault.old, fault.new))
        failed = failures(Path(folder), fault.tests, programs, "-x")
    return failed[0] if failed else ""


def trial(fault: Fault, programs: str) -> tuple[str, str]:
    """What became of a fault, found, MISSED or STALE; and the test that found it, or why."""
    start = time.monotonic()
    try:
        test = first_failure(fault, programs)
    except (Stale, subprocess.TimeoutExpired) as error:
        return "STALE", str(error)
    print(f"{time.monotonic() - start:4.0f} s  {fault}  {test or 'no test fails'}", flush=True)
    return ("found", test) if test else ("MISSED", "")


def try_all(faults: Sequence[Fault], programs: str) -> list[tuple[str, str]]:
    """What became of each fault; of those found, by tests that pass on the tree as it is."""
    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool:
        results = list(pool.map(trial, faults, [programs] * len(faults)))
    tests = dict.fromkeys(test for what, test in results if what == "found")
    broken = failures(ROOT, tests, programs) if tests else []
    return [("BROKEN", test) if test in broken else (what, test) for what, test in results]


def where(fault: Fault) -> tuple[str, str]:
    """Whether a fault can be tried, and the line that it goes into, or why not."""
    try:
        path = place(fault)
    except Stale as error:
        return "STALE", str(error)
    code = (ROOT / path).read_text()
    line = code[: code.index(fault.old)].count("\n") + 1
    return "ready", f"{path}:{line}  {' '.join(fault.tests)}"


def main(argv: Sequence[str]) -> None:
    """Tries or lists them."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    faults = read_faults(_ONLY.value)
    if _LIST.value:
        good, results = "ready", [where(x) for x in faults]
    else:
        with tempfile.TemporaryDirectory() as own:
            good, results = "found", try_all(faults, os.path.abspath(_PROGRAMS.value or own))
    counts = Counter()
    for fault, (what, text) in zip(faults, results, strict=True):
        counts[fault.room] += what == good
        if _LIST.value or what != good:
            print(f"{what}  {fault}  {text}")
    for room, n in Counter(x.room for x in faults).items():
        print(f"{room}: {counts[room]} of {n} {good}")
    print(f"{counts.total()} of {len(faults)} faults {good}")
    if counts.total() < len(faults):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)

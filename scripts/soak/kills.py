"""Ends commands by signals at random moments and counts what of docs/sessions.md does not hold.

    python -m scripts.soak.kills
    python -m scripts.soak.kills --n_signals 20 --moments 7 --commands prefill,batch

Each command is started again on what it has left, until it is done, then begins anew. Signals are
SIGINT, SIGTERM, SIGHUP and SIGKILL in turn; of the moments a third lies between the start and the
first step, the others between the first step and the end. The model is tiny, a step is slowed down
to 10 ms, and sessions are saved every 0.5 s in place of 45 (`scripts.soak.slowed`).

Nothing is lost if sessions and results are whole, have the tokens of an undisturbed run and no
fewer than before; if after SIGINT, SIGTERM and SIGHUP they have everything that was done, the exit
code is the signal's, nothing is a traceback and no temporary file is left; and if after SIGKILL
what is missing was done less than 0.5 and 15 s before, in which a save ends.

One JSON line: kills by command, signal and stage, and the most seconds that SIGKILL has cost. Each
loss is a line on standard error, and the exit code is 1.
"""

import itertools
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from scripts._lib import measure
from scripts.soak import courses

_N = flags.DEFINE_integer("n_signals", 200, "Signals.", lower_bound=1)
_SEED = flags.DEFINE_integer("moments", 0, "Seed of the moments.")
_ONLY = flags.DEFINE_list("commands", list(courses.COURSES), "Commands, in turn.")

SIGNALS = "SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if unknown := set(_ONLY.value) - set(courses.COURSES):
        raise app.UsageError(f"--commands: no such command: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        found = kill_all(Path(folder), _N.value, _SEED.value, _ONLY.value)
    measure.emit("kills", seed=_SEED.value, **found)
    sys.exit(1 if found["losses"] else 0)


def kill_all(folder: Path, n: int, seed: int, names: Sequence[str]) -> dict:
    """Counts by command, signal and stage, and the losses.

    Args:
      folder: empty.
      n: signals.
      seed: of the moments.
      names: of courses, in turn.
    """
    rng, bench = random.Random(seed), courses.Bench(folder)
    under_way = {name: courses.COURSES[name](bench, name) for name in names}
    counts: Counter[str] = Counter()
    losses: list[str] = []
    pairs = itertools.cycle((name, getattr(signal, x)) for x in SIGNALS for name in names)
    most_s = 0.0
    for i, (name, number) in enumerate(itertools.islice(pairs, n)):
        course = under_way[name]
        end = bench.killed(course, number, rng)
        kill = f"{name} {number.name} {end.stage}"
        lost = [f"{kill}: {x}" for x in courses.problems(end) + course.check(end)]
        losses += lost
        counts[kill] += 1
        most_s = max(most_s, course.lost_s(end))
        said = [end.err.decode("utf-8", "replace")] if lost else []
        print(i, *(lost or [kill]), *said, sep="\n  ", file=sys.stderr, flush=True)
    return {
        "n": n,
        "losses": losses,
        "most_lost_s": round(most_s, 2),
        "stages": dict(Counter(key.split()[2] for key in counts.elements())),
        "signals": dict(Counter(key.split()[1] for key in counts.elements())),
        "commands": dict(Counter(key.split()[0] for key in counts.elements())),
    }


if __name__ == "__main__":
    app.run(main)

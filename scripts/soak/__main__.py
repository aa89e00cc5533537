"""Runs the tests' state machines and matrix cells for as long as one likes, as users have them.

    python -m scripts.soak --minutes 10
    python -m scripts.soak --minutes 60 --ledger soak.json
    python -m scripts.soak --seed 7 --only runtime-write/3
    python -m scripts.soak --only matrix/none-runtime-read-f32-full-one-xla-plain
    python -m scripts.soak --only grids
    python -m scripts.soak --minutes 30 --whole

In tests a machine has 2 to 60 histories of 15 to 30 steps, and most modules compile without
optimisations, on an older code generator where JAX still has it. Here histories have up to 50
steps, and programs are compiled as users have them; each is searched for two defects of jaxlib
0.10.2 (tests/xla_defects.py). The work is cut into units: 25 histories of a machine, 200 where it
runs no program, or four cells of the matrix, those with most triples of values that were not tried
yet. The next one is of whatever has had least of the time. What a unit draws follows from --seed
and its name, so that --only repeats it. With --ledger, counts are added up in a file, and the next
run with the same file goes on where this one ended; one that is killed loses the unit it was in.

A step is several programs, as on a CPU, where a unit does not say otherwise; with --whole it is
one, as on accelerators.

`grids` runs the slow tests whose grids or budgets are cut for CI, whole (`pytest --full`).

One JSON line a unit, and one of all counts at the end. A unit that fails is printed with its
shortest history and the command that repeats it; the others go on, and the exit code is 1.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from scripts.soak import soaking, units
from tests import exact

_MINUTES = flags.DEFINE_float("minutes", 5.0, "How long to go on.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", None, "What is drawn; 0 if not given.", lower_bound=0)
_LEDGER = flags.DEFINE_string("ledger", None, "File of counts to go on from; made if missing.")
_ONLY = flags.DEFINE_list("only", [], "Machines, units, 'matrix', 'grids'.")
_MESH = flags.DEFINE_boolean("mesh", False, "Cells of a mesh as well.")
_SHIPPED = flags.DEFINE_boolean("shipped", True, "Programs are optimised, as users have them.")
_WHOLE = flags.DEFINE_boolean("whole", False, "A step is one program, as on accelerators.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    exact.compute_exactly()
    try:
        options = soaking.Options(
            minutes=_MINUTES.value,
            seed=_SEED.value,
            ledger=Path(_LEDGER.value) if _LEDGER.value else None,
            wanted=units.Wanted.parse(_ONLY.value),
            with_mesh=_MESH.value,
            shipped=_SHIPPED.value,
            whole=_WHOLE.value,
        )
        n_failed = soaking.run(options)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    app.run(main)

"""Runs cells of tests/matrix beyond its pairs: triples of values, for as long as one likes.

    python -m scripts.soak --minutes 10
    python -m scripts.soak --minutes 10 --seed 7 --mesh

Each cell is the one of 200 random ones with most triples that were not tried yet. One JSON line a
cell that differs from its oracle, or is refused against what the rules say; at the end one of how
many cells were run, triples among them, and the exit code 1 if any failed.
"""

import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import numpy as np
from absl import app, flags

from scripts._lib import measure
from tests.matrix import covering, history
from tests.matrix.axes import AXES, Cell

_MINUTES = flags.DEFINE_float("minutes", 5.0, "How long to go on.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Which cells are looked at.")
_MESH = flags.DEFINE_boolean("mesh", False, "Cells of a mesh as well.")
_SHIPPED = flags.DEFINE_boolean("shipped", False, "Programs are optimised, as users have them.")
_LOOKED_AT = 200


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", not _SHIPPED.value)
    counts = soak(60 * _MINUTES.value, np.random.default_rng(_SEED.value))
    measure.emit("matrix", seed=_SEED.value, **counts, of_triples=covering.n_triples())
    sys.exit(1 if counts["failed"] else 0)


def soak(seconds: float, rng: Any) -> dict[str, int]:
    """Runs cells until the time is over; what was done."""
    tried: set[tuple] = set()
    counts = {"cells": 0, "triples": 0, "failed": 0}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        cell = max(looked_at(rng), key=lambda c: len(triples(c) - tried))
        found = history.outcome(cell)
        tried |= triples(cell)
        counts |= {"cells": counts["cells"] + 1, "triples": len(tried)}
        if found.kind != "equal":
            counts["failed"] += 1
            said = {"kind": found.kind, "error": found.error, "text": found.text}
            measure.emit("matrix cell", cell=str(cell), **said)
    return counts


def looked_at(rng: Any) -> list[Cell]:
    """Cells that no rule matches."""
    found = [covering.free_cell(i) for i in rng.integers(0, covering.n_free(), _LOOKED_AT)]
    return [c for c in found if _MESH.value or c.devices == "one"]


def triples(cell: Cell) -> set[tuple]:
    """All combinations of three of its values."""
    return set(itertools.combinations(zip(AXES, cell, strict=True), 3))


if __name__ == "__main__":
    app.run(main)

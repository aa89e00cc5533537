"""Runs cells of a mesh in a process of its own, which has four simulated devices.

    python -m tests.matrix.mesh_cells CELL...

Prints a JSON object of kind, text and error a cell; JAX takes the number of devices at its start.
"""

import dataclasses
import gc
import json
import sys

import jax

from tests.matrix.axes import Cell
from tests.matrix.history import outcome


def main() -> None:
    gc.set_threshold(50_000, 20, 20)  # as in conftest.py
    jax.config.update("jax_disable_most_optimizations", True)
    for name in sys.argv[1:]:
        found = outcome(Cell(*name.split("-")))
        print(json.dumps({name: dataclasses.asdict(found)}), flush=True)


if __name__ == "__main__":
    main()

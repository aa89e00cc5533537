"""The process that measures kvrt and the peers in JAX; see `workers`."""

import gc
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from kvrt.attention.pallas import tiles
from kvrt.cli.process import startup
from scripts._lib import measure
from scripts.gpu_day.plan import Cell
from scripts.gpu_day.sides import attention, busy, steps, tile_search, upkeep
from scripts.gpu_day.sides.implementations import Implementations
from scripts.gpu_day.sides.ready import Ready
from scripts.gpu_day.workers import serve


class Bench:
    """What is open: sides of one cell, and the weights of the last shape."""

    def __init__(self) -> None:
        """Nothing yet; `hello` comes first."""
        self.open: dict[str, Ready] = {}
        self.steps = steps.Steps()

    def hello(self, message: dict[str, Any]) -> dict[str, Any]:
        """What this machine is, and what can be measured on it."""
        self.smoke, self.tiles_path = message["smoke"], Path(message["tiles"])
        if not self.smoke:
            startup.keep_programs_or_warn()
        device = jax.devices()[0]
        self.known = Implementations(interpret=self.smoke)
        where = measure.where()
        return {
            "device": where["device"],
            "n_devices": jax.device_count(),
            "backend": device.platform,
            "platform": where["platform"],
            "jax": where["jax"],
            "jaxlib": where["jaxlib"],
            "python": platform.python_version(),
            "free_bytes": min(startup.available_bytes(), 1 << 60),
            "kernels": list(self.known.kernels),
            "tiled": [x for x in self.known.kernels if self.known.tile_sizes(x)],
            "others": list(self.known.others),
        }

    def copy(self, message: dict[str, Any]) -> float:
        """GB/s of a copy."""
        return measure.copy_gb_s(message["n_runs"])

    def prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        """Opens a side of a cell: compiles it and runs it once."""
        cell, side = Cell(**message["cell"]), message["side"]
        table = self.table() if cell.tuned else None
        of = attention.Asked(
            cell=cell, side=side, n_sides=message["n_sides"], known=self.known, table=table
        )
        what = cell.part if cell.part == "upkeep" else cell.what
        makers: dict[str, Callable[[Any], Ready]] = {
            "attention": attention.ready,
            "step": self.steps.ready,
            "upkeep": upkeep.ready,
        }
        start = time.perf_counter()
        ready = makers[what](of)
        ready.run_once()
        self.open[side] = ready
        return {"open_s": round(time.perf_counter() - start, 1), **ready.figures}

    def sample(self, message: dict[str, Any]) -> list[float]:
        """Seconds of some runs of an open side, for a layer or a step."""
        return self.open[message["side"]].samples(message["n"], message["most_s"])

    def device(self, message: dict[str, Any]) -> float | None:
        """Seconds that the device was busy in a run, where a profile says so."""
        return busy.busy_s(self.open[message["side"]].run, n=5)

    def asked(self, message: dict[str, Any]) -> dict[str, Any]:
        """What a peer outside of JAX is to do for a cell."""
        cell = Cell(**message["cell"])
        of = attention.Asked(cell=cell, side="", n_sides=message["n_sides"], known=self.known)
        return attention.for_torch(of)

    def tune(self, message: dict[str, Any]) -> dict[str, Any]:
        """Tile sizes of a kernel for a cell, searched for so many seconds."""
        of = attention.Asked(
            cell=Cell(**message["cell"]), side=message["side"], n_sides=1, known=self.known
        )
        return tile_search.run(of, message["seconds"])

    def table(self) -> tiles.Table:
        """Tile sizes found so far, and those that kvrt comes with."""
        found = dict(tiles.packaged_table())
        if self.tiles_path.exists():
            found |= tiles.parse_table(self.tiles_path.read_text())
        return found

    def close(self, message: dict[str, Any]) -> None:
        """Forgets what is open; weights of a shape stay for its next cell."""
        self.open.clear()
        gc.collect()


def main() -> None:
    bench = Bench()
    names = ("hello", "copy", "prepare", "sample", "device", "asked", "tune", "close")
    serve({name: getattr(bench, name) for name in names})


if __name__ == "__main__":
    main()

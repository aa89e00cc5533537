"""Measures one cell after the other, by processes that may fail: what they say becomes a line."""

import dataclasses
import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_day import kernel_tests, plan
from scripts.gpu_day.budget import Budget
from scripts.gpu_day.plan import Cell
from scripts.gpu_day.workers import Failed, Worker

_SIDES = "scripts.gpu_day.sides"
# Seconds that an answer may take, by what was asked.
_LIMITS_S = {"prepare": 300.0, "sample": 60.0, "device": 60.0}
_LIMIT_S = 90.0
# Seconds of the search for tile sizes of one kind of work, and of samples of a side in a round.
_SEARCH_S, _ROUND_S = 60.0, 1.0
# Reasons after which a process is as good as before; others may have left its device unusable.
_HARMLESS = ("NoKernel", "BadConfig", "NotImplementedError", "ValueError", "TypeError", "Import")
_HARMLESS += ("ModuleNotFound", "MemoryError")
# Sides with bfloat16 queries, as peers have them, beside float32 ones, as kvrt's models have them.
_HALF_Q = " bf16 q"


class OutOfTime(Exception):
    """The time of the run ended before its cell did."""


@dataclasses.dataclass
class _Side:
    """Who is timed, where, and what is asked of it."""

    name: str
    worker: Worker
    message: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: list[float] = dataclasses.field(default_factory=list)


class Measuring:
    """The processes of a day, and what they can measure."""

    def __init__(self, out: Path, *, smoke: bool, budget: Budget):
        """Starts nothing yet."""
        self._budget, self._smoke, self._out = budget, smoke, out
        hello = {"do": "hello", "smoke": smoke, "tiles": str(out / "tiles.json")}
        # Memory on demand: a peer's process needs some of the same device.
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".90"}
        # Numbers of a trial mean nothing, so its programs need not be fast either.
        env |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if smoke else {}
        log = out / "workers.log"
        self._jax = Worker(f"{_SIDES}.jax_worker", log, env, hello)
        self._torch = Worker(f"{_SIDES}.torch_worker", log, {}, hello)
        self._n_rounds, self._n_runs = (2, 2) if smoke else (6, 5)
        self._copy_gb_s = 0.0

    def machine(self) -> dict[str, Any]:
        """What the process in JAX says of the machine.

        Raises:
          Failed: JAX does not start.
        """
        self._jax.start(_LIMIT_S)
        return self._jax.machine

    def stop(self) -> None:
        """Ends all processes."""
        self._jax.stop()
        self._torch.stop()
        self._copy_gb_s = 0.0

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The line of a cell.

        Raises:
          OutOfTime: the run's time ended first.
        """
        try:
            if cell.part == "tests":
                self.stop()  # the device's memory is the tests'
                return kernel_tests.run(cell, self._jax.machine, self._out, self._budget.left_s)
            if cell.part == "tiles":
                return self._tiles(cell)
            return self._timed(cell)
        except Failed as error:
            if self._budget.left_s <= 0:
                raise OutOfTime from error
            return {"failed": str(error)}

    def copy_gb_s(self) -> float:
        """GB/s of a copy, measured once in each process."""
        if not self._copy_gb_s:
            n_runs = 3 if self._smoke else 31
            self._copy_gb_s = self._ask(self._jax, "copy", {"n_runs": n_runs})
        return self._copy_gb_s

    def _ask(self, worker: Worker, what: str, message: Mapping[str, Any]) -> Any:
        limit = min(_LIMITS_S.get(what, _LIMIT_S), self._budget.left_s)
        if what == "tune":
            limit = min(message["seconds"] + _LIMIT_S, self._budget.left_s)
        try:
            return worker.ask({"do": what, **message}, limit)
        except Failed as error:
            if error.alive and not error.room and not str(error).startswith(_HARMLESS):
                worker.stop()
                raise Failed(str(error), alive=False) from error
            raise
        finally:
            if worker is self._jax and not worker.running:
                self._copy_gb_s = 0.0

    def _tiles(self, cell: Cell) -> dict[str, Any]:
        seconds = 3.0 if self._smoke else min(_SEARCH_S, self._budget.left_s / 2)
        message = {"cell": dataclasses.asdict(cell), "side": cell.what, "seconds": seconds}
        return self._ask(self._jax, "tune", message)

    # --- interleaved sides ------------------------------------------------------------------------

    def _timed(self, cell: Cell) -> dict[str, Any]:
        """All sides of a cell, interleaved; those that lack memory then, alone behind them."""
        copy = self.copy_gb_s()
        sides, found = self._sides(cell)
        waiting, alone = sides, False
        while waiting:
            opened, full = self._open(cell, waiting, len(sides), found)
            again = self._sample(opened, found)
            for side in opened:
                if side not in again and side.samples:
                    figures = self._figures(cell, side, found[side.name], copy)
                    found[side.name] |= figures | ({"alone": True} if alone else {})
            self._close()
            waiting, alone = [*again, *full], True
        line = {"copy_gb_s": round(copy, 1), "aim": plan.aim(cell), "sides": found}
        failed = [x["failed"] for x in found.values() if "failed" in x]
        if failed and not any("us" in x for x in found.values()):
            line["failed"] = failed[0]
        return line

    def _sides(self, cell: Cell) -> tuple[list[_Side], dict[str, dict[str, Any]]]:
        """Who is timed; and who cannot be, with the reason."""
        machine = self.machine()
        names = [*machine["kernels"], *machine["others"]]
        if cell.part == "upkeep":
            names = ["kvrt"]
        if cell.what == "attention" and cell.type_kv != "f32":
            names = [*names, *(name + _HALF_Q for name in machine["kernels"])]
        if cell.what == "step" and cell.peers != "all" and machine["kernels"]:
            names = machine["kernels"]
        sides = [_Side(name, self._jax) for name in names]
        found: dict[str, dict[str, Any]] = {}
        for peer in plan.peers(cell, machine["backend"]):
            if peer.needs and importlib.util.find_spec(peer.needs) is None:
                found[peer.name] = {"skipped": "not installed"}
            else:
                sides.append(_Side(peer.name, self._torch if peer.needs else self._jax))
        return sides, found

    def _open(
        self, cell: Cell, sides: Sequence[_Side], n_sides: int, found: dict[str, dict[str, Any]]
    ) -> tuple[list[_Side], list[_Side]]:
        """Sides that are ready, and those that lack memory as long as the others are."""
        opened: list[_Side] = []
        full: list[_Side] = []
        asked = {"cell": dataclasses.asdict(cell), "n_sides": n_sides}
        for side in sides:
            message = {**asked, "side": side.name}
            try:
                if side.worker is self._torch:
                    message |= self._ask(self._jax, "asked", asked)
                found[side.name] = self._ask(side.worker, "prepare", message)
                opened.append(side)
            except Failed as error:
                self._in_time(error)
                if error.room and opened:
                    full.append(side)
                elif str(error).startswith("NoKernel"):
                    found[side.name] = {"refused": str(error)}
                else:
                    found[side.name] = {"failed": str(error), "no_room": error.room}
                if not error.alive:  # what was open there is gone
                    full += [x for x in opened if x.worker is side.worker]
                    opened = [x for x in opened if x.worker is not side.worker]
        return opened, full

    def _sample(self, opened: list[_Side], found: dict[str, dict[str, Any]]) -> list[_Side]:
        """Interleaved samples of all open sides; sides that have to be opened again."""
        again: list[_Side] = []
        for _ in range(self._n_rounds):
            for side in opened:
                if side in again or "failed" in found[side.name]:
                    continue
                message = {"side": side.name, "n": self._n_runs, "most_s": _ROUND_S}
                try:
                    side.samples += self._ask(side.worker, "sample", message)
                except Failed as error:
                    self._in_time(error)
                    found[side.name], side.samples = {"failed": str(error)}, []
                    if not error.alive:
                        lost = [x for x in opened if x.worker is side.worker and x is not side]
                        again += [x for x in lost if "failed" not in found[x.name]]
        for side in again:
            side.samples = []
        return again

    def _figures(
        self, cell: Cell, side: _Side, opened: Mapping[str, Any], copy: float
    ) -> dict[str, Any]:
        """Quartiles, the rate of the bytes, and of a step the time that the device was busy."""
        low, median, high = (
            statistics.quantiles(side.samples, n=4, method="inclusive")
            if len(side.samples) > 1
            else side.samples * 3
        )
        gb_s = opened["n_bytes"] / median / 1e9
        figures: dict[str, Any] = {
            "us": [round(x * 1e6, 1) for x in (low, median, high)],
            "n_samples": len(side.samples),
            "gb_s": round(gb_s, 2),
            "share": round(gb_s / copy, 3),
        }
        if (cell.part, cell.what) == ("prefill", "step"):
            figures["tokens_a_second"] = round(cell.batch * cell.n_new / median, 1)
        if cell.what == "step" and side.worker is self._jax:
            try:
                busy = self._ask(side.worker, "device", {"side": side.name})
            except Failed as error:
                self._in_time(error)
                busy = None
            figures["device_us"] = None if busy is None else round(busy * 1e6, 1)
            figures["host_gap"] = None if busy is None else round(1 - busy / median, 3)
        return figures

    def _in_time(self, error: Failed) -> None:
        """Raises OutOfTime if that is why something failed."""
        if self._budget.left_s <= 0:
            raise OutOfTime from error

    def _close(self) -> None:
        for worker in (self._jax, self._torch):
            try:
                if worker.running:
                    self._ask(worker, "close", {})
            except Failed:
                worker.stop()

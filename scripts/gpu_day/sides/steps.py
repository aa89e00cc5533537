"""Whole steps of kvrt's models of random weights, ready to be timed."""

from scripts._lib import grid
from scripts._lib.whole_steps import Step, Weights
from scripts.gpu_day.sides.attention import Asked
from scripts.gpu_day.sides.implementations import sizes_in_force
from scripts.gpu_day.sides.ready import Ready


class Steps:
    """Steps of cells, which share the weights of a shape."""

    def __init__(self) -> None:
        """No weights yet."""
        self._weights = Weights()

    def ready(self, of: Asked) -> Ready:
        """A step of all sequences of a cell, with its cache; the cache is donated from run to run.

        Raises:
          MemoryError: weights and cache do not fit.
        """
        case = of.case()
        lacking = grid.no_room(case.n_bytes - self._weights.n_bytes)
        if lacking:
            raise MemoryError(f"the step {lacking}")
        step = Step(case, self._weights.of(case))
        group = case.spec.groups[of.cell.group]
        step()
        programs = step.device.programs
        return Ready(
            run=step,
            figures={
                "n_bytes": step.n_bytes,
                "compile_s": round(programs.compile_s, 2),
                "temp_bytes": programs.temp_bytes("forward"),
                "sizes": dict(sizes_in_force(of.key(group), of.table)),
            },
        )

"""A side of a cell that is ready to be timed."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from scripts._lib import measure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A compiled program with its arguments.

    Attributes:
      run: runs it; what is to be waited for.
      parts: layers in it, of which a sample is one.
      figures: what results say of it: bytes of a part, seconds of compiling, sizes of tiles.
      wait: waits for what `run` gives.
      again: makes ready for another run, untimed.
    """

    run: Callable[[], Any]
    parts: int = 1
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wait: Callable[[Any], Any] = jax.block_until_ready
    again: Callable[[], None] = lambda: None

    def run_once(self) -> None:
        """Runs it, so that nothing of a first run is timed."""
        self.again()
        self.wait(self.run())

    def samples(self, n: int, most_s: float) -> list[float]:
        """Seconds of a part in n runs, in fewer where they take longer than most_s."""
        clocked = measure.clock(self.run, n, again=self.again, wait=self.wait, most_s=most_s)
        return [x / self.parts for x in clocked]

"""How much of the time is left, and whether a cell still fits."""

import time
from collections import defaultdict
from collections.abc import Callable

# Seconds that a cell takes, before one of its kind was measured.
EXPECTED_S = {
    "tests": 120.0,
    "tiles": 75.0,
    "decode attention": 25.0,
    "decode step": 60.0,
    "prefill attention": 25.0,
    "prefill step": 60.0,
    "upkeep": 20.0,
}
# Kept back for the tables.
_END_S = 5.0


class Budget:
    """Minutes that a run may take, of which cells of each kind learn what they need."""

    def __init__(
        self,
        minutes: float,
        *,
        quick: bool = False,
        now: Callable[[], float] = time.monotonic,
    ):
        """Begins now; with `quick`, nothing is expected to take long."""
        self._now, self._quick = now, quick
        self._end = now() + 60 * minutes - _END_S
        self._taken: defaultdict[str, list[float]] = defaultdict(list)

    @property
    def left_s(self) -> float:
        """Seconds until the tables have to be made."""
        return self._end - self._now()

    def expected_s(self, kind: str) -> float:
        """Seconds of a cell of a kind: the mean of the last few, else a first guess."""
        taken = self._taken[kind][-5:]
        return sum(taken) / len(taken) if taken else 0.0 if self._quick else EXPECTED_S[kind]

    def fits(self, kind: str) -> bool:
        """Whether a cell of a kind is likely to end in time."""
        return self.left_s > 0 and self.expected_s(kind) <= self.left_s

    def learn(self, kind: str, seconds: float) -> None:
        """Counts what a cell has taken."""
        self._taken[kind].append(seconds)

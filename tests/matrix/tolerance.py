"""How far logits may be from those of the oracle, and what is said of those that are further."""

from typing import Any

import numpy as np

from tests.matrix.axes import Cell

# Greatest difference of a logit, by KV dtype; logits lie within about 3. Keys by channel are
# quantized with their neighbours, which the oracle does not follow: its keys are float16.
TOLERANCE = {"f32": 1e-4, "kivi4": 0.13}
ROUNDED = 2e-3
# Where a K-shift quantizes keys again and again, one number of them may be next to a tie and round
# to the other side: of int8 that is 0.0027 of a logit of two layers.
TIED = 5e-3


class Different(AssertionError):
    """Not what the oracle has."""


def tolerance(cell: Cell) -> float:
    """Of an engine's keys by channel the oracle follows the groups."""
    if cell.is_engine and cell.dtype == "kivi4":
        return ROUNDED
    if cell.policy == "attention_sinks" and cell.rope == "write" and cell.dtype == "int8":
        return TIED
    return TOLERANCE.get(cell.dtype, ROUNDED)


class Judge:
    """Compares logits, and keeps the worst difference."""

    def __init__(self, cell: Cell):
        self.limit, self.worst = tolerance(cell), 0.0

    def __call__(self, what: str, found: Any, *wanted: np.ndarray) -> None:
        """The nearest of what may be wanted counts."""
        found = np.asarray(found, np.float64)
        differs = min(np.abs(found - x).max() if found.shape == x.shape else np.inf for x in wanted)
        self.worst = max(self.worst, float(differs))
        if not differs <= self.limit:
            raise Different(f"{what}: logits differ by {differs:.3g}, limit {self.limit}")

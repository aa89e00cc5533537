"""Methods of a `Runtime` by their old names, which warn."""

from typing import Any

import numpy as np

from kvrt.arrays import Int32
from kvrt.errors import warn_renamed

Ints = Int32[np.ndarray, " n"]


def text(self: Any, seq_id: int = 0) -> tuple[Ints, Ints]:
    """`token_history`, by its old name."""
    warn_renamed("Runtime.text", "call Runtime.token_history")
    return self.token_history(seq_id)


def earliest_resume(self: Any, seq_id: int = 0) -> int:
    """`resume_positions(seq_id).earliest`, by its old name."""
    warn_renamed("Runtime.earliest_resume", "call Runtime.resume_positions")
    return self.resume_positions(seq_id).earliest

"""What a runtime has done, in numbers."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropEvent:
    """Tokens that a context shift removed: how many, and how long the sequence was then."""

    seq_id: int
    n_past: int
    n_dropped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of a `Runtime`.

    Attributes:
      n_ctx: cells.
      n_kv: highest cell in use plus one.
      cells_used: cells in use.
      n_shift: context shifts.
      n_kshift: rotations of pending cells.
      n_dropped: tokens removed by context shifts.
      n_defrag: defragmentations that moved a cell.
      n_compiles: programs compiled.
      compile_s: time that took.
      cache_bytes: bytes of all rows.
      drops: each context shift.
    """

    n_ctx: int
    n_kv: int
    cells_used: int
    n_shift: int
    n_kshift: int
    n_dropped: int
    n_defrag: int
    n_compiles: int
    compile_s: float
    cache_bytes: int
    drops: tuple[DropEvent, ...]

"""What a runtime has done, in numbers."""

import dataclasses

from kvrt.cells import Cells, n_ctx, n_kv, n_used
from kvrt.program.programs import Programs


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
      n_extend: rounds of SelfExtend in the cache.
      n_dropped: tokens removed by context shifts.
      n_defrag: defragmentations that moved a cell.
      n_bad_logits: times that logits with NaN, +inf or no finite value ended a generation.
      n_compiles: programs compiled, or taken from JAX's persistent compilation cache.
      n_from_disk: those of them that were taken from there.
      compile_s: time that took.
      cache_bytes: bytes of keys, values and states.
      drops: each context shift.
    """

    n_ctx: int
    n_kv: int
    cells_used: int
    n_shift: int
    n_kshift: int
    n_extend: int
    n_dropped: int
    n_defrag: int
    n_bad_logits: int = 0
    n_compiles: int
    n_from_disk: int
    compile_s: float
    cache_bytes: int
    drops: tuple[DropEvent, ...]


@dataclasses.dataclass
class Counts:
    """What a runtime counts itself, in the terms of `Stats`."""

    n_kshift: int = 0
    n_extend: int = 0
    n_defrag: int = 0
    n_bad_logits: int = 0
    drops: list[DropEvent] = dataclasses.field(default_factory=list)

    def snapshot(self, cells: Cells, programs: Programs, cache_bytes: int) -> Stats:
        """All numbers as they are now."""
        return Stats(
            n_ctx=n_ctx(cells),
            n_kv=int(n_kv(cells)),
            cells_used=int(n_used(cells)),
            n_shift=len(self.drops),
            n_kshift=self.n_kshift,
            n_extend=self.n_extend,
            n_dropped=sum(d.n_dropped for d in self.drops),
            n_defrag=self.n_defrag,
            n_bad_logits=self.n_bad_logits,
            n_compiles=programs.n_compiles,
            n_from_disk=programs.n_from_disk,
            compile_s=programs.compile_s,
            cache_bytes=cache_bytes,
            drops=tuple(self.drops),
        )

"""What a runtime has done, in numbers."""

import dataclasses
from typing import Literal

from kvrt.attention.choice import AttentionChoice
from kvrt.attention.scored.policy import ScoredPolicy
from kvrt.cellcache.host_cells import HostCells
from kvrt.cells import n_ctx, n_kv, n_used
from kvrt.kv_types import KeyDtypes, KVDtypes
from kvrt.options.select import Select
from kvrt.program.device import Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropEvent:
    """Tokens that a policy removed: how many, how long the sequence was then, and its name."""

    seq_id: int
    n_past: int
    n_dropped: int
    policy: str = "context_shift"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LostCheckpoint:
    """A context checkpoint that is there no more.

    Attributes:
      seq_id: its sequence.
      pos: tokens that it stood after.
      reason: "evicted" to keep within the limits, "cut" as its sequence was cut back before it, or
        "changed" as positions before it were removed or moved.
    """

    seq_id: int
    pos: int
    reason: Literal["evicted", "cut", "changed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of a `Runtime`.

    Attributes:
      unit: counted by the next three: cells, or states where no layer has cells (recurrent layers
        and policies by score keep one a sequence, however long its text is).
      n_ctx: cells.
      n_kv: highest cell in use plus one.
      cells_used: cells in use.
      n_shift: context shifts.
      n_kshift: rotations of pending cells.
      n_extend: rounds of SelfExtend in the cache.
      n_dropped: tokens removed by context shifts.
      n_defrag: defragmentations that moved a cell.
      n_bad_logits: times that logits with NaN, +inf or no finite value ended a generation.
      n_nan_scores: scores of a policy by score that were NaN; those tokens were evicted first.
      programs: how a step is dispatched, "by_layer" or "whole", and why.
      n_compiles: programs that are there: compiled, taken from JAX's persistent compilation cache,
        or found in this process.
      n_from_disk: those of them that were taken from that cache.
      n_shared: those that an earlier Runtime or Engine has compiled.
      compile_s: time that took.
      cache_bytes: bytes of keys, values and states.
      attention: what computes attention, and why.
      type_k: KV dtype of keys; of each group of layers, where they differ.
      type_v: KV dtype of values, likewise.
      drops: each context shift.
      n_checkpoints: context checkpoints, those that sequences share counted once.
      checkpoint_bytes: of their keys, values and states, beside cache_bytes.
      n_rewinds: times that a sequence was cut back to one.
      n_recomputed: tokens evaluated again from one up to where the cut was.
      lost_checkpoints: those that are there no more, and why.
      n_rounds: steps that verified drafts.
      n_drafted: drafts that they were given.
      n_accepted: those that stayed; each round samples one more token than stays.
      scored: what keeps tokens by score, None where nothing does.
      select: how decode reads some cells, None where it reads all.
    """

    unit: Literal["cell", "state"] = "cell"
    n_ctx: int
    n_kv: int
    cells_used: int
    n_shift: int
    n_kshift: int
    n_extend: int
    n_dropped: int
    n_defrag: int
    n_bad_logits: int = 0
    n_nan_scores: int = 0
    programs: str = ""
    n_compiles: int
    n_from_disk: int
    n_shared: int = 0
    compile_s: float
    cache_bytes: int
    attention: AttentionChoice
    drops: tuple[DropEvent, ...]
    n_checkpoints: int = 0
    checkpoint_bytes: int = 0
    n_rewinds: int = 0
    n_recomputed: int = 0
    lost_checkpoints: tuple[LostCheckpoint, ...] = ()
    type_k: KeyDtypes = "f32"
    type_v: KVDtypes = "f32"
    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    scored: ScoredPolicy | None = None
    select: Select | None = None

    def since(self, earlier: "Stats") -> "Stats":
        """The same, with shifts, drops, rounds and defragmentations counted from an earlier one."""
        names = ("n_shift", "n_kshift", "n_extend", "n_dropped", "n_defrag")
        counts = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        return dataclasses.replace(self, drops=self.drops[len(earlier.drops) :], **counts)


@dataclasses.dataclass
class Counts:
    """What a runtime counts itself, in the terms of `Stats`."""

    n_kshift: int = 0
    n_extend: int = 0
    n_defrag: int = 0
    n_bad_logits: int = 0
    drops: list[DropEvent] = dataclasses.field(default_factory=list)
    n_rewinds: int = 0
    n_recomputed: int = 0
    lost_checkpoints: list[LostCheckpoint] = dataclasses.field(default_factory=list)
    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def snapshot(self, host: HostCells, device: Device) -> Stats:
        """All numbers as they are now."""
        programs, cells, checkpoints = device.programs, host.cells, host.checkpoints
        return Stats(
            unit="state" if host.main is None else "cell",
            n_ctx=n_ctx(cells),
            n_kv=int(n_kv(cells)),
            cells_used=int(n_used(cells)),
            n_shift=len(self.drops),
            n_kshift=self.n_kshift,
            n_extend=self.n_extend,
            n_dropped=sum(d.n_dropped for d in self.drops),
            n_defrag=self.n_defrag,
            n_bad_logits=self.n_bad_logits,
            n_nan_scores=programs.nan_scores.n,
            n_compiles=programs.n_compiles,
            n_from_disk=programs.n_from_disk,
            n_shared=programs.n_shared,
            programs=": ".join(device.dispatch),
            compile_s=programs.compile_s,
            cache_bytes=device.n_bytes,
            attention=device.attention,
            drops=tuple(self.drops),
            n_checkpoints=len(checkpoints.unique),
            checkpoint_bytes=checkpoints.n_bytes,
            n_rewinds=self.n_rewinds,
            n_recomputed=self.n_recomputed,
            lost_checkpoints=tuple(self.lost_checkpoints),
            type_k=device.spec.config.type_k,
            type_v=device.spec.config.type_v,
            n_rounds=self.n_rounds,
            n_drafted=self.n_drafted,
            n_accepted=self.n_accepted,
            scored=device.layout.policy,
            select=device.spec.config.select,
        )

"""What an engine has done, in numbers: counted step by step, reported as `EngineStats`.

`kvrt.serving.prometheus` hands them to Prometheus, `kvrt.cli.report.metrics` to people.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvrt.attention.choice import AttentionChoice
from kvrt.paged.pool import BlockPool
from kvrt.paged.residency import Residency
from kvrt.program.device import Device
from kvrt.serving.request import SeqState
from kvrt.serving.scheduling.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolUse:
    """A pool of blocks, or a cache of cells, at one moment.

    Attributes:
      n_units: blocks or cells that can be used.
      n_free: nobody holds them.
      n_cached: of the free ones, those that a prefix hit can still find.
      n_evicted: that could be found and no longer can, so far.
      n_pinned: that are held by pins, whoever holds them as well.
    """

    n_units: int
    n_free: int
    n_cached: int = 0
    n_evicted: int = 0
    n_pinned: int = 0

    @property
    def usage(self) -> float:
        """Units that are held, as a part of all."""
        return 1 - self.n_free / self.n_units if self.n_units else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointUse:
    """Context checkpoints of an engine at one moment.

    Attributes:
      n: checkpoints, shared ones once; in blocks, blocks of windows and states that hits may need.
      n_bytes: of their keys, values and states.
      n_evicted: those that are there no more, so far.
    """

    n: int
    n_bytes: int
    n_evicted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierUse:
    """A tier at one moment.

    Attributes:
      n_bytes: that it holds.
      counts: blocks so far, by what became of them.
    """

    n_bytes: int
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of an `Engine`; what counts anything never falls.

    Attributes:
      seconds: since the engine was made.
      n_steps: steps that ran.
      n_ahead: those of them that were dispatched before the tokens of the step before were read.
      n_running: samples that run.
      n_waiting: samples that do not yet, or were preempted.
      n_bad_logits: samples ended by logits with NaN, +inf or no finite value.
      n_nan_scores: scores of a policy by score that were NaN; those tokens were evicted first.
      tokens: "prompt" and "decode", computed as such, and "sampled".
      finished: samples that ended, by their finish_reason.
      prefix: tokens "asked" for and "hit" in the prefix cache by new requests; "asked_again" and
        "hit_again" by those that were preempted, most of which is their own work; "session", those
        of "hit" that files of a folder gave.
      sequences: "admitted", "forked", "preempted", and "offloaded", those preempted to a tier.
      drops: "events" and "tokens" that policies dropped.
      n_extend: rounds of SelfExtend in the cache.
      drafts: "rounds", each the newest token of a sample and its drafts, tokens "drafted" in them,
        and those that were "accepted".
      reads: with `EngineConfig.shared_reads`, cached tokens that were "read_once" in place of once
        for each of the sequences that share them, and what that spared: "not_read_again". Each
        group of layers counts, in each step.
      n_pins: prefixes that are pinned.
      pools: where tokens are.
      checkpoints: of windows and states; None where none are kept.
      tiers: beyond the device, by name.
      residency: how long blocks stay, as histograms by name; empty where nobody follows that.
      programs: as in `kvrt.Stats`, as what follows.
      n_compiles: programs that are there.
      n_from_disk: those of them that were taken from JAX's persistent compilation cache.
      n_shared: those that an earlier Runtime or Engine has compiled.
      compile_s: time that took.
      cache_bytes: bytes of all cached keys, values and states.
      attention: what computes attention, and why; None if nobody says.
    """

    seconds: float
    n_steps: int
    n_running: int
    n_waiting: int
    n_bad_logits: int
    tokens: Mapping[str, int]
    finished: Mapping[str, int]
    prefix: Mapping[str, int]
    sequences: Mapping[str, int]
    drops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    n_extend: int = 0
    drafts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reads: Mapping[str, int] = dataclasses.field(default_factory=dict)
    n_ahead: int = 0
    n_nan_scores: int = 0
    n_pins: int = 0
    pools: tuple[PoolUse, ...] = ()
    checkpoints: CheckpointUse | None = None
    tiers: Mapping[str, TierUse] = dataclasses.field(default_factory=dict)
    residency: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    programs: str = ""
    n_compiles: int = 0
    n_from_disk: int = 0
    n_shared: int = 0
    compile_s: float = 0.0
    cache_bytes: int = 0
    attention: AttentionChoice | None = None

    @property
    def hit_rate(self) -> float:
        """Tokens of new requests that the prefix cache had, as a part of all."""
        asked = self.prefix["asked"]
        return self.prefix["hit"] / asked if asked else 0.0

    @property
    def usage(self) -> list[float]:
        """How full each pool is."""
        return [p.usage for p in self.pools]


def use_of_blocks(pool: BlockPool, n_pinned: int) -> PoolUse:
    """How full a pool of blocks is now; block 0 is nobody's."""
    return PoolUse(
        n_units=pool.n_blocks - 1,
        n_free=pool.n_free,
        n_cached=pool.n_cached,
        n_evicted=pool.n_evicted,
        n_pinned=n_pinned,
    )


def device_counts(device: Device) -> dict[str, Any]:
    """What a device has compiled and holds, by fields of `EngineStats`."""
    return {
        "n_compiles": device.programs.n_compiles,
        "n_from_disk": device.programs.n_from_disk,
        "n_shared": device.programs.n_shared,
        "programs": ": ".join(device.dispatch),
        "compile_s": device.programs.compile_s,
        "n_nan_scores": device.programs.nan_scores.n,
        "cache_bytes": device.n_bytes,
        "attention": device.attention,
    }


class Metrics:
    """Counters of an engine; nothing here is ever counted down.

    Args:
      residency: how long blocks stay, where somebody follows that.
      clock: seconds.
    """

    def __init__(
        self,
        residency: Residency | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts with zeros."""
        self._residency, self._clock, self._began = residency, clock, clock()
        self._n_steps = self._n_ahead = self._n_bad_logits = self._n_extend = 0
        self._tokens = Counter(prompt=0, decode=0, sampled=0)
        self._finished = Counter(stop=0, length=0, cancelled=0, error=0)
        self._prefix = Counter(asked=0, hit=0, asked_again=0, hit_again=0, session=0)
        self._drops = Counter(events=0, tokens=0)
        self._sequences = Counter(admitted=0, forked=0, preempted=0, offloaded=0)
        self._drafts = Counter(rounds=0, drafted=0, accepted=0)

    def planned(self, plan: StepPlan) -> None:
        """A step is planned; call it before the scheduler hears that it ran.

        Hits of those who were preempted are counted apart: most are their own work.
        """
        for state in plan.admitted:
            if state.request.cache:
                again = "_again" if state.n_preempted else ""
                self._prefix[f"asked{again}"] += len(state.tokens)
                self._prefix[f"hit{again}"] += state.n_computed
                if not state.n_preempted:
                    self._prefix["session"] += min(state.n_session or 0, state.n_computed)
        self._sequences["admitted"] += len(plan.admitted)
        self._sequences["preempted"] += len(plan.preempted)
        self._sequences["offloaded"] += len(plan.offloaded)
        for _, _, due in plan.edited:
            self._drops["events"] += len(due.drops)
            self._drops["tokens"] += sum(drop.n for drop in due.drops)
            self._n_extend += len(due.divided)

    def ran(self, plan: StepPlan, n_sampled: int, n_past: int = 0, *, ahead: bool = False) -> None:
        """The planned step ran, and so many tokens were sampled; n_past more were past an end."""
        self._n_steps += 1
        self._n_ahead += ahead
        self._tokens["decode"] += len(plan.decode) - n_past
        self._tokens["prompt"] += sum(n for _, _, n in plan.prompts)
        self._tokens["sampled"] += n_sampled
        self._sequences["forked"] += sum(dst.seq_id is not None for _, dst in plan.forks)

    def forked(self, n: int) -> None:
        """So many samples began as forks of another one, beside those of a plan."""
        self._sequences["forked"] += n

    def drafted(self, plan: StepPlan, n_accepted: int) -> None:
        """The drafts of a plan were verified, of which so many stay."""
        n_drafted = sum(map(len, plan.drafts.values()))
        self._drafts.update(rounds=len(plan.drafts), drafted=n_drafted, accepted=n_accepted)
        self._tokens["decode"] += n_accepted

    def bad_logits(self) -> None:
        """Logits of a sample have NaN, +inf or no finite value."""
        self._n_bad_logits += 1

    def finished(self, state: SeqState) -> None:
        """A sample ended."""
        self._finished[str(state.finish_reason)] += 1

    def snapshot(self, *, n_running: int, n_waiting: int, **now: Any) -> EngineStats:
        """All numbers as they are now.

        Args:
          n_running: samples that run.
          n_waiting: samples that do not yet, or were preempted.
          **now: other fields of `EngineStats` that are not counted here.
        """
        return EngineStats(
            seconds=self._clock() - self._began,
            n_steps=self._n_steps,
            n_running=n_running,
            n_waiting=n_waiting,
            n_bad_logits=self._n_bad_logits,
            tokens=dict(self._tokens),
            finished=dict(self._finished),
            prefix=dict(self._prefix),
            sequences=dict(self._sequences),
            drops=dict(self._drops),
            n_extend=self._n_extend,
            drafts=dict(self._drafts),
            n_ahead=self._n_ahead,
            residency=self._residency.report() if self._residency else {},
            **now,
        )

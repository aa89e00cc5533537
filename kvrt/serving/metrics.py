"""What an engine has done, in numbers: counted step by step, reported as one dictionary.

`Metrics.report` makes the dictionary; `kvrt.serving.prometheus` hands it to Prometheus,
`kvrt.cli.report.metrics` to people.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvrt.paged.residency import Residency
from kvrt.serving.request import SeqState
from kvrt.serving.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolUse:
    """A pool of blocks, or a cache of cells, at one moment.

    Attributes:
      n_units: blocks or cells that can be used.
      n_free: nobody holds them.
      n_cached: of the free ones, those that a prefix hit can still find.
      n_evicted: that could be found and no longer can, so far.
    """

    n_units: int
    n_free: int
    n_cached: int = 0
    n_evicted: int = 0

    @property
    def usage(self) -> float:
        """Units that are held, as a part of all."""
        return 1 - self.n_free / self.n_units if self.n_units else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierUse:
    """A tier at one moment.

    Attributes:
      n_bytes: that it holds.
      counts: blocks so far, by what became of them.
    """

    n_bytes: int
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


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
        self._steps, self._tokens = 0, Counter(prompt=0, decode=0, drawn=0)
        self._ended = Counter(stop=0, length=0, cancelled=0, error=0)
        self._bad_logits = 0
        self._prefix = Counter(asked=0, hit=0, asked_again=0, hit_again=0)
        self._rows = Counter(admitted=0, forked=0, preempted=0, parked=0)

    def planned(self, plan: StepPlan) -> None:
        """A step is planned; call it before the scheduler hears that it ran.

        Hits of those who were preempted are counted apart: most are their own work.
        """
        for state in plan.admitted:
            if state.request.cache:
                again = "_again" if state.n_preempted else ""
                self._prefix[f"asked{again}"] += len(state.tokens)
                self._prefix[f"hit{again}"] += state.n_computed
        self._rows["admitted"] += len(plan.admitted)
        self._rows["preempted"] += len(plan.preempted)
        self._rows["parked"] += len(plan.offloaded)

    def ran(self, plan: StepPlan, n_sampled: int) -> None:
        """The planned step ran, and so many tokens were sampled."""
        self._steps += 1
        self._tokens["decode"] += len(plan.decode)
        self._tokens["prompt"] += plan.n_tokens - len(plan.decode)
        self._tokens["drawn"] += n_sampled
        self._rows["forked"] += sum(dst.seq_id is not None for _, dst in plan.forks)

    def bad_logits(self) -> None:
        """Logits of a sample have NaN, +inf or no finite value."""
        self._bad_logits += 1

    def ended(self, state: SeqState) -> None:
        """A sample ended."""
        self._ended[str(state.finish_reason)] += 1

    def report(
        self,
        *,
        n_running: int,
        n_waiting: int,
        pools: Sequence[PoolUse] = (),
        tiers: Mapping[str, TierUse] | None = None,
    ) -> dict[str, Any]:
        """Everything, as it is now.

        Args:
          n_running: samples that run.
          n_waiting: samples that do not yet, or were preempted.
          pools: where tokens are.
          tiers: by name.
        """
        asked = self._prefix["asked"]
        found: dict[str, Any] = {
            "seconds": self._clock() - self._began,
            "steps": self._steps,
            "tokens": dict(self._tokens),
            "ended": dict(self._ended),
            "bad_logits": self._bad_logits,
            "n_running": n_running,
            "n_waiting": n_waiting,
            "prefix": dict(self._prefix),
            "hit_rate": self._prefix["hit"] / asked if asked else 0.0,
            "rows": dict(self._rows),
            "usage": [p.usage for p in pools],
            "pools": [dataclasses.asdict(p) for p in pools],
            "tiers": {name: dataclasses.asdict(t) for name, t in (tiers or {}).items()},
        }
        if self._residency is not None:
            found["residency"] = self._residency.report()
        return found

"""Tile sizes of a kernel: searched one after the other, each from the best found so far.

    python -m scripts.bench.tiles --shape llama-3.1-8b --type_k bf16 --type_v bf16 --batch 32 \
        --context 4096

A line a kernel and size, for attention alone in the layers that see all. What gives another result
than the rule's sizes is not taken, nor what does not compile. At the end the best sizes and the
rule's are interleaved; a gain below two percent is none. `scripts.gpu_day` collects these lines.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from scripts._lib import attention_alone, commands, grid, implementations, measure, rounds
from scripts._lib.cases import Case

_SECONDS = flags.DEFINE_float("seconds", 60.0, "Of each search.", lower_bound=0.0)

# The least share of the rule's time that is gained.
_GAIN = 0.02
# Beside the greatest output of the rule's sizes: what order of summation may change in bfloat16.
_TOLERANCE = 0.02
_N_LAYERS, _N_ROUNDS, _N_RUNS = 4, 5, 7

Sizes = dict[str, int]


def main() -> None:
    grid.check_sizes()
    for case in (case for of in grid.cases() for case in of):
        choices = implementations.tile_choices(case.attention)
        if case.n_new == 1:
            # One token's query heads fill the least tile already.
            choices = {k: v for k, v in choices.items() if k != "queries"}
        refused = implementations.refusal(case.attention)
        if not choices or refused:
            continue
        measure.emit("tiles", side=_name(case), **grid.named(case), **searched(case, choices))


def _name(case: Case) -> str:
    return implementations.plain_name(case.attention)


@dataclasses.dataclass
class Search:
    """What was tried: seconds of a layer by sizes, or why there are none."""

    seconds: dict[tuple, float] = dataclasses.field(default_factory=dict)
    failed: dict[tuple, str] = dataclasses.field(default_factory=dict)

    def run(
        self,
        choices: Mapping[str, Sequence[int]],
        measure: Callable[[Sizes], float],
        goes_on: Callable[[], bool],
    ) -> Sizes:
        """The best sizes found while `goes_on`; those of the rule are {}. One is always tried."""
        best: Sizes = {}
        self._try(best, measure)
        each = [(name, value) for name, values in choices.items() for value in values]
        for name, value in [*each, *each]:
            if not goes_on() and len(self.seconds) + len(self.failed) > 1:
                break
            sizes = {**best, name: value}
            known = self._try(sizes, measure)
            if known is not None and known < self.seconds.get(_key(best), float("inf")):
                best = sizes
        return best

    def _try(self, sizes: Sizes, measure: Callable[[Sizes], float]) -> float | None:
        key = _key(sizes)
        if key not in self.seconds and key not in self.failed:
            try:
                self.seconds[key] = measure(sizes)
            # A compiler may refuse sizes in any way it likes.
            except Exception as error:
                self.failed[key] = rounds.one_line(error)
        return self.seconds.get(key)


def _key(sizes: Mapping[str, int]) -> tuple:
    return tuple(sorted(sizes.items()))


class _Trial:
    """A case's attention with any sizes."""

    def __init__(self, case: Case):
        """Compiles nothing yet."""
        self._case, self._group = case, case.spec.groups[-1]
        key = attention_alone.key(case, self._group, "f32")
        assert key is not None, "a kernel"
        self.key, self._wanted = key, np.zeros(0)
        self.kept: dict[tuple, rounds.Ready] = {}

    def __call__(self, sizes: Sizes) -> float:
        """Seconds of a layer, the best of a few runs.

        Raises:
          ValueError: the output is another one.
        """
        table = {self.key: sizes} if sizes else {}
        attention: Any = grid.in_force(_name(self._case), table)
        case = dataclasses.replace(self._case, attention=attention)
        ready = attention_alone.prepare(case, self._group, 3, n_most=_N_LAYERS)
        found = np.asarray(jax.block_until_ready(ready.run()), np.float32)
        if not sizes:
            self._wanted = found
        error = float(np.max(np.abs(found - self._wanted)))
        most = _TOLERANCE * float(np.max(np.abs(self._wanted)))
        if not error <= most:
            raise ValueError(f"another result: off by {error:.2g}, {most:.2g} allowed")
        self.kept[_key(sizes)] = ready
        return min(self.side(sizes, 3)())

    def side(self, sizes: Sizes, n: int) -> Callable[[], Iterator[float]]:
        """Seconds of a layer in n runs."""
        ready = self.kept[_key(sizes)]
        return lambda: (x / ready.parts for x in measure.clock(ready.run, n))

    def forget_all_but(self, *kept: Sizes) -> None:
        """Frees the caches of all other sizes."""
        keys = {_key(sizes) for sizes in kept}
        self.kept = {key: ready for key, ready in self.kept.items() if key in keys}


def searched(case: Case, choices: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The best sizes for a case, where they gain anything, and what they and the rule's take."""
    end = time.perf_counter() + _SECONDS.value
    trial, search = _Trial(case), Search()

    def timed(sizes: Sizes) -> float:
        found = trial(sizes)
        fastest = min(search.seconds, key=lambda key: search.seconds[key], default=())
        trial.forget_all_but({}, dict(fastest), sizes)
        return found

    best = search.run(choices, timed, lambda: time.perf_counter() < end)
    if () not in search.seconds:
        return {"skipped": f"the rule's own sizes fail: {search.failed[()]}"}
    sides = {"rule": trial.side({}, _N_RUNS), "best": trial.side(best, _N_RUNS)}
    times = rounds.interleaved(sides, _N_ROUNDS, n_warm=0)
    gained = bool(best) and times.over("best", "rule") <= 1 - _GAIN
    return {
        "key": dataclasses.asdict(trial.key),
        "sizes": best if gained else {},
        "rule_us": round(times.median("rule") * 1e6, 1),
        "best_us": round(times.median("best" if gained else "rule") * 1e6, 1),
        "n_tried": len(search.seconds) + len(search.failed),
        "refused": [f"{dict(key)}: {why}" for key, why in search.failed.items()],
    }


if __name__ == "__main__":
    commands.run(main)

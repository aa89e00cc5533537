"""Search for a kernel's tile sizes: one size after the other, each from the best found so far.

What gives another result than the rule's sizes is not taken, nor what does not compile. At the end
the best ones and the rule's are interleaved; a gain below two percent is none.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvrt.attention.pallas import tiles
from scripts._lib import attention_alone
from scripts.gpu_day.sides.attention import Asked
from scripts.gpu_day.workers import one_line

# The least share of the rule's time that is gained.
_GAIN = 0.02
# Beside the greatest output of the rule's sizes: what order of summation may change in bfloat16.
_TOLERANCE = 0.02
_ROUNDS, _RUNS = 5, 7

Sizes = dict[str, int]


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
                self.failed[key] = one_line(error)
        return self.seconds.get(key)


def _key(sizes: Mapping[str, int]) -> tuple:
    return tuple(sorted(sizes.items()))


class _Trial:
    """A cell's attention with any sizes."""

    def __init__(self, of: Asked):
        """Compiles nothing yet."""
        self._of, self._wanted = of, np.zeros(0)
        group = of.case().spec.groups[of.cell.group]
        self._group, key = group, of.key(group)
        assert key is not None, "a kernel"
        self.key = key
        self.kept: dict[tuple, attention_alone.Chain] = {}

    def __call__(self, sizes: Sizes) -> float:
        """Seconds of a layer, the best of a few runs.

        Raises:
          ValueError: the output is another one.
        """
        of = dataclasses.replace(self._of, table={self.key: sizes} if sizes else {})
        chain = attention_alone.prepare(
            of.case().of_group(self._group, min(4, len(self._group.layers))),
            {"f32": "float32", "bf16": "bfloat16"}[of.type_q],
        )
        found = np.asarray(jax.block_until_ready(chain.run()), np.float32)
        if not sizes:
            self._wanted = found
        error = float(np.max(np.abs(found - self._wanted)))
        most = _TOLERANCE * float(np.max(np.abs(self._wanted)))
        if not error <= most:
            raise ValueError(f"another result: off by {error:.2g}, {most:.2g} allowed")
        self.kept[_key(sizes)] = chain
        return min(self.time(sizes, 3))

    def time(self, sizes: Sizes, n: int) -> list[float]:
        """Seconds of a layer in n runs."""
        chain, found = self.kept[_key(sizes)], []
        for _ in range(n):
            start = time.perf_counter()
            jax.block_until_ready(chain.run())
            found.append((time.perf_counter() - start) / chain.n_layers)
        return found

    def forget_all_but(self, *kept: Sizes) -> None:
        """Frees the caches of all other sizes."""
        keys = {_key(sizes) for sizes in kept}
        self.kept = {key: chain for key, chain in self.kept.items() if key in keys}


def run(of: Asked, seconds: float) -> dict[str, Any]:
    """The best sizes for a cell, where they gain anything, and what they and the rule's take."""
    end = time.perf_counter() + seconds
    trial, search = _Trial(of), Search()
    best: Sizes = {}

    def measure(sizes: Sizes) -> float:
        found = trial(sizes)
        fastest = min(search.seconds, key=lambda key: search.seconds[key], default=())
        trial.forget_all_but({}, dict(fastest), sizes)
        return found

    choices = of.known.tile_sizes(of.name)
    if of.cell.n_new == 1:
        # One token's query heads fill the least tile already.
        choices = {k: v for k, v in choices.items() if k != "queries"}
    best = search.run(choices, measure, lambda: time.perf_counter() < end)
    if () not in search.seconds:
        raise ValueError(f"the rule's own sizes fail: {search.failed[()]}")
    rule_s, best_s = _interleaved(trial, best)
    gained = bool(best) and best_s <= (1 - _GAIN) * rule_s
    return {
        "key": dataclasses.asdict(trial.key),
        "sizes": best if gained else {},
        "rule_us": round(rule_s * 1e6, 1),
        "best_us": round((best_s if gained else rule_s) * 1e6, 1),
        "n_tried": len(search.seconds) + len(search.failed),
        "refused": [f"{dict(key)}: {why}" for key, why in search.failed.items()],
    }


def _interleaved(trial: _Trial, best: Sizes) -> tuple[float, float]:
    """Median seconds of a layer with the rule's sizes, and with the best."""
    if not best:
        median = float(np.median(trial.time({}, _RUNS)))
        return median, median
    rounds = [(trial.time({}, _RUNS), trial.time(best, _RUNS)) for _ in range(_ROUNDS)]
    rule, found = (np.concatenate(x) for x in zip(*rounds, strict=True))
    return float(np.median(rule)), float(np.median(found))


def entry(result: Mapping[str, Any]) -> tuple[tiles.Key, Sizes, str]:
    """What a search found as an entry of a table, with a note of its gain."""
    note = f"{result['best_us']} us a layer, {result['rule_us']} by the rule"
    return tiles.Key(**result["key"]), dict(result["sizes"]), note

"""Sides that are compared: called one after the other, round after round, and what they take.

A bench makes a side for each setting and calls `interleaved`, or `compared` where a side is a
program with a cache of its own, of which not all may fit beside each other.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scripts._lib import measure

# Gives the seconds of each of its samples in a round.
Side = Callable[[], Iterable[float]]
# What says that memory alone was lacking.
_NO_ROOM = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory", "no room", "GiB of")


class Times(dict[str, list[float]]):
    """Seconds of all samples by side; and how many rounds were left out, for others took part."""

    n_left_out = 0

    def median(self, side: str) -> float:
        """Median seconds."""
        return float(np.median(self[side]))

    def ms(self, side: str, digits: int = 2) -> list[float]:
        """Quartiles in milliseconds."""
        return measure.quartiles(self[side], digits=digits)

    def over(self, side: str, other: str, digits: int = 3) -> float:
        """A side's median by another's."""
        return round(self.median(side) / self.median(other), digits)

    def figures(self) -> dict[str, list[float]]:
        """Quartiles of all sides with samples, for a line of results."""
        return {f"{side}_ms": self.ms(side) for side in self if self[side]}


def timed(run: Callable[[], Any], n: int = 1, **how: Any) -> Side:
    """A side of n calls a round; `how` are arguments of `measure.clock`."""
    return lambda: measure.clock(run, n, **how)


def interleaved(
    sides: Mapping[str, Side],
    n_rounds: int,
    *,
    n_warm: int = 1,
    in_order: bool = False,
    undisturbed: bool = False,
) -> Times:
    """Times of n_rounds rounds, behind some that compile and are not counted.

    Args:
      sides: by name.
      n_rounds: that are counted.
      n_warm: that come before.
      in_order: a side leaves something to the next one; else another is first in each round.
      undisturbed: leaves out rounds in which other processes took more than 4 % of the time.
    """
    times, names = Times({name: [] for name in sides}), list(sides)
    for i in range(-n_warm, n_rounds):
        first = 0 if in_order else i % len(names)
        busy, own, start = _busy_s(), time.process_time(), time.perf_counter()
        found = {name: list(sides[name]()) for name in names[first:] + names[:first]}
        others = _busy_s() - busy - (time.process_time() - own)
        if i < 0:
            continue
        if undisturbed and others > 0.04 * (time.perf_counter() - start) + 0.02:
            times.n_left_out += 1
            continue
        for name, samples in found.items():
            times[name] += samples
    return times


def _busy_s() -> float:
    """Seconds of all processors' work so far, where the system says it."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, *others = map(int, stat.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A program that can be timed.

    Attributes:
      run: runs it; what is to be waited for.
      parts: layers in it, of which a sample is one.
      n_bytes: that a part has to read, or moves.
      figures: what else a line says of it.
      again: makes ready for another run, untimed.
      behind: figures that are taken behind the samples, which it is given.
    """

    run: Callable[[], Any]
    parts: int = 1
    n_bytes: int = 0
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    again: Callable[[], None] = lambda: None
    behind: Callable[[list[float]], Mapping[str, Any]] = lambda samples: {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """A side that was timed: seconds of a part in each run. Without any, figures say why."""

    samples: list[float] = dataclasses.field(default_factory=list)
    n_bytes: int = 0
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def compared(makers: Mapping[str, Callable[[], Ready]], n_runs: int) -> dict[str, Timed]:
    """Sides that are made, and timed in n_runs rounds; those without room beside others, alone."""
    found: dict[str, Timed] = {}
    full = _side_by_side(makers, n_runs, found)
    for name, make in full.items():
        _side_by_side({name: make}, n_runs, found)
        if found[name].samples:
            alone = {**found[name].figures, "alone": True}
            found[name] = dataclasses.replace(found[name], figures=alone)
    return {name: found[name] for name in makers}


def _side_by_side(
    makers: Mapping[str, Callable[[], Ready]], n_runs: int, found: dict[str, Timed]
) -> dict[str, Callable[[], Ready]]:
    """Times sides beside each other; gives those that have no room now."""
    opened: dict[str, Ready] = {}
    full: dict[str, Callable[[], Ready]] = {}
    for name, make in makers.items():
        # Where the process dies, this is the side that it died of.
        print(f"side: {name}", file=sys.stderr, flush=True)
        try:
            ready = make()
            ready.again()
            jax.block_until_ready(ready.run())
        # Whatever a compiler, a driver or a library says is this side's result.
        except Exception as error:
            found[name] = Timed(figures={"skipped": one_line(error)})
            if len(makers) > 1 and any(x in str(error) for x in _NO_ROOM):
                full[name] = make
        else:
            opened[name] = ready
    sides = {x: timed(r.run, again=r.again) for x, r in opened.items()}
    for name, seconds in (interleaved(sides, n_runs, n_warm=0) if sides else {}).items():
        ready = opened[name]
        samples = [x / ready.parts for x in seconds]
        figures = {**ready.figures, **ready.behind(samples)}
        found[name] = Timed(samples=samples, n_bytes=ready.n_bytes, figures=figures)
    return full


def one_line(error: Exception, most: int = 200) -> str:
    """An error to be read in a table."""
    text = " ".join(str(error).replace("|", "/").split()) or "no message"
    return f"{type(error).__name__}: {text}"[:most]

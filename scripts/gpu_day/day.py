"""The run of a day: cell after cell as long as there is time, then the tables."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvrt.attention.pallas import tiles
from scripts.gpu_day import machine, plan, tables
from scripts.gpu_day.budget import Budget
from scripts.gpu_day.ledger import Ledger
from scripts.gpu_day.measuring import Measuring, OutOfTime
from scripts.gpu_day.workers import Failed

_OWN_TILES = plan.ROOT / "kvrt" / "attention" / "pallas" / "tiles.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for, as the flags say."""

    out: Path
    smoke: bool
    only: tuple[str, ...]
    minutes: float
    retry: bool = False
    keep_tiles: bool = False


def run(options: Options) -> None:
    """Measures what is not measured yet; ends the process with 2 where nothing can be."""
    options.out.mkdir(parents=True, exist_ok=True)
    budget = Budget(options.minutes, quick=options.smoke)
    measuring = Measuring(options.out, smoke=options.smoke, budget=budget)
    try:
        _run(options, measuring, budget)
    finally:
        measuring.stop()


def _run(options: Options, measuring: Measuring, budget: Budget) -> None:
    out = options.out
    try:
        here = machine.describe(measuring.machine(), out, smoke=options.smoke)
    except Failed as error:
        _end(f"JAX does not start: {error}; see {out / 'workers.log'}")
    refused = machine.refusal(here)
    if refused:
        _end(refused)
    if options.smoke:
        cells = plan.smoke(here["tiled"], options.only)
    else:
        cells = plan.plan(here["backend"], here["tiled"], options.only)
    ledger = Ledger(out / "results.jsonl", here, retry=options.retry)
    if ledger.began:
        _say(ledger.began)
    waiting = [cell for cell in cells if cell.name not in ledger.lines]
    _say(f"{here['device']}: {len(cells) - len(waiting)} of {len(cells)} cells are measured")
    write_tiles(out, ledger.lines)
    measure_all(waiting, measuring, budget, ledger, lambda: write_tiles(out, ledger.lines))
    text = tables.render(here, cells, ledger.lines)
    (out / "tables.md").write_text(text)
    print(text, end="", flush=True)
    n_left = sum(cell.name not in ledger.lines for cell in cells)
    _say(f"{n_left} cells are left; the same command continues with them" if n_left else "all done")
    if options.keep_tiles:
        _keep_tiles(out)


def measure_all(
    waiting: Sequence[plan.Cell],
    measuring: Measuring,
    budget: Budget,
    ledger: Ledger,
    tiles_found: Callable[[], None],
) -> None:
    """Measures cells in their order; those for which the time is too short are left.

    Args:
      waiting: cells that are not measured yet.
      measuring: who measures.
      budget: of time.
      ledger: where lines go as soon as they are made.
      tiles_found: called after a search for tile sizes.
    """
    for cell in waiting:
        if not budget.fits(cell.kind):
            continue
        start = budget.left_s
        try:
            line = measuring.measure(cell)
        except (OutOfTime, KeyboardInterrupt):
            return
        seconds = start - budget.left_s
        budget.learn(cell.kind, seconds)
        fields = {k: v for k, v in dataclasses.asdict(cell).items() if v not in ("", 0)}
        ledger.add(cell.name, {**fields, **line, "seconds": round(seconds, 1)})
        if cell.part == "tiles":
            tiles_found()
        _say(f"{cell.name}: {in_words(line)} ({seconds:.0f} s, {budget.left_s / 60:.1f} min left)")


def in_words(line: Mapping[str, Any]) -> str:
    """A line of results in a few words."""
    if "failed" in line or "skipped" in line:
        return f"failed: {line['failed']}" if "failed" in line else f"skipped: {line['skipped']}"
    if "passed" in line:
        return f"{line['passed']} passed, {line['n_failed']} failed"
    if "rule_us" in line:
        return f"{line['rule_us']} us by the rule, {line['best_us']} with {line['sizes'] or 'it'}"
    aim = f", aim {line['aim']:.0%}" if line["aim"] else ""
    shown = [
        f"{name} {side['us'][1]:,.0f} us, {side['share']:.0%} of copy"
        for name, side in line["sides"].items()
        if "us" in side
    ]
    return "; ".join(shown) + aim


def write_tiles(out: Path, lines: Mapping[str, Mapping[str, Any]]) -> None:
    """The table of what was found so far, which cells that are "tuned" have in force."""
    table: dict[tiles.Key, Mapping[str, int]] = {}
    notes: dict[tiles.Key, str] = {}
    for line in lines.values():
        if line.get("part") == "tiles" and line.get("sizes"):
            key = tiles.Key(**line["key"])
            table[key] = line["sizes"]
            notes[key] = f"{line['best_us']} us a layer, {line['rule_us']} by the rule"
    (out / "tiles.json").write_text(tiles.table_text(table, notes))


def _keep_tiles(out: Path) -> None:
    found = tiles.parse_table((out / "tiles.json").read_text())
    _OWN_TILES.write_text(tiles.table_text({**tiles.packaged_table(), **found}))
    _say(f"{len(found)} entries are in {_OWN_TILES.relative_to(plan.ROOT)} now")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end(reason: str) -> NoReturn:
    _say(reason)
    sys.exit(2)

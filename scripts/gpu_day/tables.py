"""Markdown tables of a day, for docs/benchmarks.md: what was measured, failed, and is left."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scripts.gpu_day.plan import PEERS, Cell

Line = Mapping[str, Any]
# The least share of a step's wall time in which the device works: no host gap.
_BUSY = 0.95
_NOT_RUN = "not run"


def render(machine: Mapping[str, Any], cells: Sequence[Cell], lines: Mapping[str, Line]) -> str:
    """All tables.

    Args:
      machine: what it was measured on.
      cells: of the plan.
      lines: results by name of their cell.
    """
    done = [(cell, lines[cell.name]) for cell in cells if cell.name in lines]
    parts = [_machine(machine, done), _tests(done), _tiles(done)]
    for title, part, what in (
        ("Decode: attention alone, microseconds a layer", "decode", "attention"),
        ("Decode: a whole step, milliseconds", "decode", "step"),
        ("Prefill of 512 tokens: attention alone, microseconds a layer", "prefill", "attention"),
        ("Prefill of 512 tokens: a whole step, milliseconds", "prefill", "step"),
    ):
        chosen = [(c, x) for c, x in done if (c.part, c.what) == (part, what)]
        parts.append(_timed(title, chosen))
    parts += [_upkeep(done), _failures(done), _left(cells, lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(machine: Mapping[str, Any], done: Sequence[tuple[Cell, Line]]) -> str:
    copies = sorted({line["copy_gb_s"] for _, line in done if "copy_gb_s" in line})
    copy = f"{copies[0]:,.0f} to {copies[-1]:,.0f} GB/s" if copies else _NOT_RUN
    driver = machine.get("driver_version", machine["platform"])
    clocks = machine.get("clocks.sm", machine.get("clocks", "not readable"))
    smoke = " A trial with tiny shapes (--smoke): no figure here means anything." * machine["smoke"]
    return (
        f"{machine['device']} ({machine['n_devices']}), driver {driver}, clocks {clocks}; "
        f"jax {machine['jax']}, jaxlib {machine['jaxlib']}; kvrt {machine['commit']}. A copy moves "
        f"{copy}, reads and writes counted. Medians; sides were interleaved.{smoke}"
    )


def _tests(done: Sequence[tuple[Cell, Line]]) -> str:
    rows = []
    for cell, line in done:
        if cell.part == "tests":
            counts = [line.get(x, "") for x in ("passed", "n_failed", "n_skipped")]
            rows.append([f"`{cell.what}`", *counts, line.get("failed", line.get("skipped", ""))])
            rows += [["", "", "", "", f"{k}: {v}"] for k, v in line.get("failures", {}).items()]
    heads = ["tests, compiled", "passed", "failed", "skipped", "reason"]
    return table("Kernels' tests", heads, rows)


def _tiles(done: Sequence[tuple[Cell, Line]]) -> str:
    rows = []
    for cell, line in done:
        if cell.part == "tiles" and "key" in line:
            of = line["key"]
            what = f"{cell.what}: {of['step']}, q {of['type_q']}, cache {of['type_k']}, heads of "
            what += f"{of['head_dim']}, blocks of {of['block_size']}"
            sizes = ", ".join(f"{k} {v}" for k, v in line["sizes"].items()) or "the rule's"
            tried = f"{line['n_tried']}, {len(line['refused'])} refused"
            rows.append([what, line["rule_us"], line["best_us"], sizes, tried])
    heads = ["tile sizes", "by the rule, µs", "best, µs", "best sizes", "tried"]
    return table("Tile sizes", heads, rows)


def _timed(title: str, done: Sequence[tuple[Cell, Line]]) -> str:
    """A row a cell: the first kernel with its share of a copy, then everybody else."""
    names = list(dict.fromkeys(name for _, line in done for name in line.get("sides", {})))
    order = [peer.name for peer in PEERS]
    names.sort(key=lambda name: order.index(name) if name in order else -1)
    steps = any(cell.what == "step" for cell, _ in done)
    digits = _ms if steps else _us
    shares = names and any(cell.part == "decode" for cell, _ in done)
    heads = ["shape", "batch", "context", "cache"]
    for name in names:
        heads += [name, "of copy"] if shares and name not in order else [name]
    heads += ["aim"] * bool(shares) + ["device", "host gap"] * steps
    rows = []
    for cell, line in done:
        sides = line.get("sides", {})
        row = [_shape(cell, sides), cell.batch, f"{cell.context:,}", cell.type_kv]
        for name in names:
            side = sides.get(name, {})
            row.append(_figure(side, digits))
            row += [_share(side, line)] if shares and name not in order else []
        aim = line.get("aim")
        row += [f"{aim:.0%}" if aim else ""] * bool(shares)
        rows.append(row + _busy(sides) * steps)
    return table(title, heads, rows)


def _shape(cell: Cell, sides: Mapping[str, Line]) -> str:
    """The shape; which of its layers, and whether measured tile sizes were in force."""
    notes = [f"layers of kind {cell.group}"] if cell.group else []
    notes += ["tuned"] if any(side.get("sizes") for side in sides.values()) else []
    return f"{cell.shape} ({', '.join(notes)})" if notes else cell.shape


def _figure(side: Line, digits: Callable[[float], str]) -> str:
    """A median, "alone" where it was not interleaved; or why there is none."""
    if "us" in side:
        rate = side.get("tokens_a_second")
        notes = f" ({rate:,.0f} tokens a second)" if rate else ""
        return digits(side["us"][1]) + notes + (", alone" if side.get("alone") else "")
    if "skipped" in side:
        return str(side["skipped"])
    if "refused" in side:
        return "refused"
    if "failed" in side:
        return "no room" if side.get("no_room") else "failed"
    return ""


def _share(side: Line, line: Line) -> str:
    if "share" not in side:
        return ""
    aim = line.get("aim")
    below = " (below)" if aim and side["share"] < aim else ""
    return f"{side['share']:.0%}{below}"


def _busy(sides: Mapping[str, Line]) -> list[str]:
    """Time of the device in the first side that has one, and the host's share of the wall time."""
    side = next((x for x in sides.values() if x.get("device_us") is not None), None)
    if side is None:
        return ["not readable", "not readable"]
    below = " (above 5 %)" if side["host_gap"] > 1 - _BUSY else ""
    return [_ms(side["device_us"]), f"{side['host_gap']:.1%}{below}"]


def _upkeep(done: Sequence[tuple[Cell, Line]]) -> str:
    rows = []
    for cell, line in done:
        if cell.part == "upkeep":
            side = line.get("sides", {}).get("kvrt", line)
            share = _share(side, line)
            aim = line.get("aim")
            row = [cell.what, cell.shape, f"{cell.context:,}", _figure(side, _ms), share]
            rows.append([*row, f"{aim:.0%}" if aim else ""])
    heads = ["what", "shape", "cells", "ms", "of copy, bytes of the blocks touched", "aim"]
    return table("Upkeep", heads, rows)


def _failures(done: Sequence[tuple[Cell, Line]]) -> str:
    rows = []
    for cell, line in done:
        sides = line.get("sides", {})
        for name, side in sides.items():
            reason = side.get("failed") or side.get("refused")
            rows += [[cell.name, name, reason]] if reason else []
        rows += [[cell.name, "", line["failed"]]] if "failed" in line and not sides else []
    return table("What could not be measured", ["cell", "side", "reason"], rows)


def _left(cells: Iterable[Cell], lines: Mapping[str, Line]) -> str:
    left = [cell.name for cell in cells if cell.name not in lines]
    return table(f"Not run: {len(left)} cells", ["cell"], [[name] for name in left])


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with a title; "" without rows."""
    if not rows:
        return ""
    lines = [f"**{title}**", "", _row(heads), "|" + "---|" * len(heads), *map(_row, rows)]
    return "\n".join(lines)


def _row(values: Iterable[Any]) -> str:
    return "| " + " | ".join(str(x).replace("|", "/") for x in values) + " |"


def _us(us: float) -> str:
    return f"{us:,.1f}"


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f}"

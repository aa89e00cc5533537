"""Draws what blended chunks lose over the share of tokens that is computed again.

    python -m scripts.experiments.reuse.blend_plot
    python -m scripts.experiments.reuse.blend > mine.jsonl
    python -m scripts.experiments.reuse.blend_plot --figures mine.jsonl --picture mine.png

The figures are lines as `scripts.experiments.reuse.blend` prints them, "way" and "kl"; those of
docs/plots/blend.jsonl also say of which prompts they are, and a panel is drawn for each kind. The
controls beside the rules: nothing computed again with keys moved ("reused") and left as they are
("unmoved"), random tokens, and masks by row, as the authors' code has them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from absl import flags

from kvrt.errors import KvrtError, UsageError
from scripts._lib import commands
from scripts.experiments import plots

_PLOTS = Path(__file__).resolve().parents[3] / "docs" / "plots"
_FIGURES = flags.DEFINE_string("figures", str(_PLOTS / "blend.jsonl"), "Lines of measured figures.")
_PLOT = flags.DEFINE_string("picture", str(_PLOTS / "blend.png"), "The picture.")

# By name of a way, its label, colour and marker.
CURVES = {
    "values": ("values furthest off", "C0", "o-"),
    "keys": ("keys furthest off", "C1", "s-"),
    "first": ("first tokens of each chunk", "C2", "^-"),
    "random": ("random tokens (control)", "C3", "x--"),
}
LEVELS = {
    "reused": ("moved, nothing again", "C4", ":"),
    "unmoved": ("left at their positions (control)", "C5", "-."),
}
Figures = dict[str, dict[str, float]]  # by kind of prompts and way, nats


def main() -> int:
    try:
        draw(read(_FIGURES.value), _PLOT.value)
    except KvrtError as error:
        print(f"blend_plot: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read(path: str) -> Figures:
    """Figures of a file.

    Raises:
      UsageError: there is no such file, or a line is none.
    """
    found: Figures = {}
    try:
        for line in map(json.loads, Path(path).read_text("utf-8").splitlines()):
            found.setdefault(line.get("prompts", ""), {})[line["way"]] = float(line["kl"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--figures {path}: {error}; give what scripts.experiments.reuse.blend prints"
        ) from error
    if not found:
        raise UsageError(f"--figures {path}: the file is empty; give at least one way")
    return found


def curve(ways: dict[str, float], name: str) -> list[tuple[float, float]]:
    """Shares in per cent and divergences of a rule; without any, chunks that are reused."""
    named = (x.split() for x in ways if x.startswith(f"{name} "))
    points = [(100 * float(ratio), ways[f"{name} {ratio}"]) for _, ratio in named]
    if "reused" in ways and points and min(points)[0] > 0:
        points.append((0.0, ways["reused"]))
    return sorted(points)


def draw(found: Figures, path: str) -> None:
    """A panel for each kind of prompts, all of the same height."""
    size = {"figsize": (5.5 * len(found), 4.5), "layout": "constrained", "sharey": True}
    with plots.panels(path, 1, len(found), **size) as (_, (axes,)):
        for axis, (prompts, ways) in zip(axes, found.items(), strict=True):
            _panel(axis, ways)
            axis.set(title=prompts, xlabel="% of the chunks' tokens computed in every layer")
        axes[0].set_ylabel("KL from a prefill of the whole, nats")
        axes[0].legend(fontsize=8)


def _panel(axes: Any, ways: dict[str, float]) -> None:
    for name, (label, color, marker) in CURVES.items():
        points = [(x, y) for x, y in curve(ways, name) if x < 100]
        axes.plot(*zip(*points, strict=True), marker, color=color, label=label) if points else None
    for name, (label, color, marker) in LEVELS.items():
        if name in ways:
            axes.axhline(ways[name], color=color, linestyle=marker, label=label)
    by_row = next((name for name in ways if name.endswith("mask by row")), None)
    if by_row is not None:
        ratio = 100 * float(by_row.split()[2].rstrip(","))
        axes.plot([ratio], [ways[by_row]], "*k", ms=10, label="values, masks by row (control)")
    axes.set(yscale="log", xlim=(-1, 32))


if __name__ == "__main__":
    commands.run(main)

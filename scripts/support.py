"""Writes docs/support.md: what works together, what is refused, and what is still to be done.

    python -m scripts.support

All of it is said by tests/matrix: the axes, the rules of what is refused, and the cells that the
tests compare with an oracle. Nothing is run here.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvrt.options import compose
from scripts._lib import commands
from tests.matrix import covering
from tests.matrix.axes import AXES, MEANING, Cell
from tests.matrix.drafted import DRAFTED, NOT_DRAFTED
from tests.matrix.families import FAMILIES, LIMIT
from tests.matrix.indexed import INDEXED, NOT_INDEXED
from tests.matrix.rules import DEBTS, REFUSED, RULES, Rule, traits_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"

_INTRO = """\
# What works together

Every combination below is either proved equal to an oracle by a test or refused when the object is
made, in one line with the reason and the remedy; what is neither is a debt and is listed as one.
The oracle is a list of (position, key, value) in NumPy, rounded to the KV dtype number by number.
Each test runs a prompt, decodes past the context where a policy evicts, saves or offloads where
that is asked for, and takes a second turn.

This page is generated from `tests/matrix` by `python -m scripts.support`; do not edit it.

- a number: proved equal; [the list of cells](#cells) has the test
- R: [refused](#refused) when the object is made
- N: [no option](#no-option): the object has nothing of the kind
- D: [a debt](#debts)

A rule in parentheses forbids the pair together with values of a third axis.
"""


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}: {len(covering.pairs())} cells, {len(RULES)} rules")


def page() -> str:
    """The whole text."""
    parts = [_INTRO, _axes(), "## Pairs\n"]
    parts += [_table(a, b) for a, b in itertools.combinations(AXES, 2)]
    parts += [
        _cells(),
        _drafts(),
        _indexed(),
        _families(),
        _rules("Refused", [r for r in REFUSED if r.kind == "refused"]),
        _rules("No option", [r for r in REFUSED if r.kind == "absent"]),
        _rules("Debts", DEBTS),
    ]
    return "\n".join(parts)


def entry(a: str, x: str, b: str, y: str) -> str:
    """What is known of two values."""
    found = covering.cell_of(a, x, b, y)
    ids = ", ".join(r.id for r in RULES if _is_about(r, (a, x), (b, y)))
    if found is not None:
        number = str(covering.pairs().index(found) + 1)
        return f"{number} ({ids})" if ids else number
    return ids or " and ".join(r.id for r in covering.reasons(a, x, b, y))


def _is_about(rule: Rule, *values: tuple[str, str]) -> bool:
    """Whether a rule forbids two values together, or with others."""
    pairs = itertools.permutations(rule.needs, len(values))
    return any(all(x in need for x, need in zip(values, two, strict=True)) for two in pairs)


def _table(a: str, b: str) -> str:
    """The axis with more values goes down."""
    if len(AXES[a]) < len(AXES[b]):
        a, b = b, a
    lines = [f"### {a} and {b}\n", _line([a, *AXES[b]]), _line(["---", *["---"] * len(AXES[b])])]
    lines += [_line([x, *(entry(a, x, b, y) for y in AXES[b])]) for x in AXES[a]]
    return "\n".join(lines) + "\n"


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def _axes() -> str:
    lines = ["## Axes\n"]
    lines += [f"- **{name}** ({', '.join(of)}): {MEANING[name]}" for name, of in AXES.items()]
    return "\n".join(lines) + "\n"


def _cells() -> str:
    lines = ["## Cells\n", "Each is a test of `tests/matrix`, marked `slow`.\n"]
    cells = enumerate(covering.pairs(), 1)
    lines += [f"{i}. `{covering.test_of(c)}[{c}]`" for i, c in cells]
    return "\n".join(lines) + "\n"


def _families() -> str:
    lines = [
        "## Families\n",
        "Families whose layers share, compress or skip, as tiny random models with f32 weights and",
        f"cache; differences are the largest of a logit, of which tests allow {LIMIT:.0e} at most.",
        "Other families have the first of these tests too.\n",
        _line(["family", "layers", "judge", "largest difference", "test"]),
        _line(["---"] * 5),
    ]
    of = [(x.name, x.layers, x.judge, f"{x.difference:.1e}", f"`{x.test}`") for x in FAMILIES]
    return "\n".join([*lines, *map(_line, of)]) + "\n"


def _drafts() -> str:
    lines = [
        "## Drafts\n",
        "The same histories with speculative decoding: prompt lookup (`ngram`), or drafts that are",
        "wrong at an index that goes round (`wrong`). They stand beside the pairs; every kind of",
        "layer has tests of its own, `tests/runtime/test_speculation.py` and",
        "`tests/serving/test_engine_drafts.py`.\n",
    ]
    return _beside(lines, "test_matrix_drafts.py", DRAFTED, NOT_DRAFTED)


def _indexed() -> str:
    lines = [
        "## An indexer\n",
        "The same histories with `indexed` among the layers: `latent`, whose queries read the 16",
        "tokens that an indexer scores highest (`GroupSpec.indexed`). They stand beside the pairs;",
        "on a mesh such layers are refused as well.\n",
    ]
    return _beside(lines, "test_matrix_indexed.py", INDEXED, NOT_INDEXED)


def _beside(lines: Sequence[str], test: str, cells: Sequence[Cell], refused: Sequence[Cell]) -> str:
    """A section of cells that stand beside the pairs, and of those that are refused."""
    proved = [f"- `{test}[{cell}]`" for cell in cells]
    rules = [(cell, compose.refusal(traits_of(cell))) for cell in refused]
    others = [f"- refused, `{cell}`: {rule[1]}" for cell, rule in rules if rule]
    return "\n".join([*lines, *proved, *others]) + "\n"


def _either(need: Sequence[tuple[str, str]]) -> str:
    """Some values, by axis."""
    of = {axis: ", ".join(x for a, x in need if a == axis) for axis, _ in need}
    return " or ".join(f"{axis} {values}" for axis, values in of.items())


def _rules(title: str, rules: Sequence[Rule]) -> str:
    lines = [f"## {title}\n", *([] if rules else ["None."])]
    for r in rules:
        when = " and ".join(map(_either, r.needs))
        kind = "" if r.kind in ("refused", "absent") else f" ({r.kind})"
        first, *others = covering.witnesses(r)
        more = f" and {len(others)} more" if others else ""
        test = f"`test_matrix_rules.py::{covering.test_of_rule(r)}[{r.id}-{first}]`{more}"
        lines.append(f"- **{r.id}**, {when}{kind}: {r.why}. {test}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    commands.run(main)

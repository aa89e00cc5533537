"""The picture of blended chunks: its figures are those of the docs; what is none is said."""

from pathlib import Path

import pytest

from kvrt.errors import UsageError
from scripts.experiments.reuse import blend_plot

DOCS = Path(__file__).parents[2] / "docs"


def test_the_figures_are_those_of_the_table():
    text = (DOCS / "methods.md").read_text()
    found = blend_plot.read(str(DOCS / "plots" / "blend.jsonl"))
    assert len(found) == 2
    for ways in found.values():
        assert {"reused", "unmoved", "random 0.15", "first 0.15"} <= set(ways)
        for rule in blend_plot.CURVES:
            (none, reused), *points = blend_plot.curve(ways, rule)
            assert (none, reused) == (0.0, ways["reused"])
            assert [x for x, _ in points] == [5.0, 15.0, 30.0]
            assert ", ".join(f"{y:.3f}" for _, y in points) in text
        assert all(f"{kl:.3f}" in text for kl in ways.values())


@pytest.mark.parametrize("text", ["", "no figure", '{"way": "reused"}', "[]"])
def test_other_files_are_a_line(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text + "\n" * bool(text))
    with pytest.raises(UsageError, match=r"--figures .*a\.jsonl") as error:
        blend_plot.read(str(path))
    assert "\n" not in str(error.value)

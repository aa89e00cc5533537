"""How much of kvrt one decode step enters; the docs go through all files of a Runtime's."""

import pytest
from importgraph import ROOT

from kvrt.program.serialized import program_file
from scripts import walk

pytestmark = pytest.mark.slow

# Files, and about how many lines of the functions entered. These may only shrink. Those of a
# Runtime have grown once, from 15 / 470 and 32 / 1,316: a call runs under kvrt's settings of JAX,
# takes NumPy's integers, is refused in a forked process and after `close`, and holds Ctrl-C until
# its step is whole; the step is that of rounds and of models with kinds of layers too. What is
# traced looks for a file of its program first: 20 lines. What makes room knows policies and rounds
# of SelfExtend as one schedule, and a sample its own: 6 and 4 lines. Tables of RoPE may move keys
# from where they are stored: 20 lines, most of them words. On CPU long lists are read by sums of
# their own: 1 file. An engine's cells are blocks: a block list may be of larger ones.
LIMITS = {
    "warm": (16, 518),
    "traced": (34, 1524),
    "engine in cells warm": (21, 673),
    "engine in cells traced": (33, 1445),
    "engine in blocks warm": (21, 689),
    "engine in blocks traced": (32, 1462),
}


@pytest.fixture(scope="module")
def walked():
    with pytest.MonkeyPatch.context() as patch:
        # A command that ran in this process keeps programs; a library's Runtime looks for no file.
        patch.setattr(program_file, "jax_folder", None)
        return walk.walked()


@pytest.mark.parametrize("step", LIMITS)
def test_a_step_enters_no_more_than_it_did(walked, step):
    n_files, n_lines = LIMITS[step]
    found = walked[step]
    assert len(found) <= n_files and sum(found.values()) <= n_lines, found


def test_the_docs_walk_through_every_file(walked):
    text = (ROOT / "docs" / "concepts.md").read_text().split("## One decode step")[1]
    names = [path.removeprefix("kvrt/") for path in walked["traced"]]
    assert [name for name in names if f"`{name}`" not in text] == []

"""A few cells of the matrix, one a kind of cache; the oracle's eyes; and the page made from it."""

import itertools
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from kvrt.config import MaskKind
from kvrt.kv_types import KVDtype
from kvrt.options import compose
from kvrt.options.cache import ExtendKind, RopeMode
from kvrt.policies import POLICIES
from scripts import support
from tests.matrix import covering
from tests.matrix.axes import AXES, MEANING, Cell
from tests.matrix.drafted import DRAFTED
from tests.matrix.families import FAMILIES, LIMIT
from tests.matrix.indexed import INDEXED
from tests.matrix.judged import assert_equal, assert_ruled
from tests.matrix.plaincache import N_READ, SCORED, PlainSeq
from tests.matrix.plainmodel import drawn, masks_of
from tests.matrix.rules import RULES, Rule, traits_of
from tests.matrix.tolerance import TOLERANCE, tolerance

KVRT = Path(compose.__file__).parents[1]
EQUAL = (
    Cell(),
    Cell(policy="context_shift", layers="full+window", state="session"),
    Cell(policy="attention_sinks", dtype="int4"),
    Cell(policy="extend_cache", rope="read"),
    Cell(policy="extend_paper", rope="read", dtype="bf16"),
    Cell(where="blocks", dtype="int8"),
    Cell(where="engine_cells", layers="window"),
)
# Refused without compiling anything; a mesh has a process of its own.
QUICK = [r for r in RULES if r.kind == "refused" and covering.witnesses(r)[0].devices == "one"]


@pytest.mark.parametrize("cell", EQUAL, ids=str)
def test_a_plain_cell_is_equal_to_its_oracle(cell):
    assert_equal(cell)


@pytest.mark.parametrize("rule", QUICK, ids=lambda r: r.id)
def test_a_rule_holds_in_its_plainest_cell(rule):
    assert_ruled(rule, covering.witnesses(rule)[0])


def test_a_debt_that_was_mended_says_what_to_delete():
    debt = Rule("D0", (), "mid-run", "whatever", "nothing")
    with pytest.raises(AssertionError, match="is equal to its oracle now: delete rule D0"):
        assert_ruled(debt, Cell())
    refused = Cell(policy="extend_cache", layers="window")
    with pytest.raises(AssertionError, match=r"refused: BadConfig .* D0 says mid-run"):
        assert_ruled(debt, refused)


@pytest.mark.slow
def test_every_pair_is_proved_or_forbidden():
    """Whatever the greedy choice did: a pair is in a cell, or rules forbid it; none is broken."""
    for cell in covering.pairs():
        assert not [r.id for r in RULES if r.matches(cell)], cell
    for a, b in itertools.combinations(AXES, 2):
        there = {(getattr(c, a), getattr(c, b)) for c in covering.pairs()}
        for x, y in itertools.product(AXES[a], AXES[b]):
            assert ((x, y) in there) != bool(covering.reasons(a, x, b, y)), (a, x, b, y)


def test_the_axes_have_what_kvrt_has():
    """A new policy, KV dtype or mask joins the matrix."""
    assert {*get_args(KVDtype), "kivi4"} == set(AXES["dtype"])
    extends = {f"extend_{kind}" for kind in get_args(ExtendKind)}
    # Policies by score differ in what they look at: all queries, the last of them, and a query now
    # and then, between which some of the tokens are read.
    assert {"none", *POLICIES, *SCORED} | extends == set(AXES["policy"])
    masks = {mask.kind for name in AXES["layers"] for mask in masks_of(name)}
    # No runtime has layers that see what comes later.
    assert masks == set(get_args(MaskKind)) - {"symmetric"}
    assert set(AXES["rope"]) == set(get_args(RopeMode))


def test_the_tests_named_on_the_page_are_there():
    names = {covering.test_of(c) for c in covering.pairs()}
    names |= {f"test_matrix_rules.py::{covering.test_of_rule(r)}" for r in RULES}
    for file, name in (x.split("::") for x in names):
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), name


def test_the_tests_of_families_are_there():
    for family in FAMILIES:
        file, name = family.test.split("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text(), name
        assert family.difference < LIMIT


def test_rules_are_told_apart_and_each_has_a_cell():
    ids = [r.id for r in RULES]
    assert len(ids) == len(set(ids)) and set(MEANING) == set(AXES)
    for rule in RULES:
        assert covering.witnesses(rule), rule.id
        assert all(value in AXES[axis] for need in rule.needs for axis, value in need), rule.id


def test_no_rule_of_kvrt_forbids_a_cell_that_is_compared():
    """The other direction has a cell a rule above, and `test_matrix_rules.py` has all of them."""
    for cell in (*covering.pairs(), *DRAFTED, *INDEXED):
        assert compose.refusal(traits_of(cell)) is None, cell


def test_each_trait_of_a_rule_is_stated_somewhere():
    stated = "".join(path.read_text() for path in KVRT.rglob("*.py") if path.name != "compose.py")
    for trait in {x for rule in compose.RULES for x in rule.traits}:
        assert f'"{trait}"' in stated, trait


def damaged(rows, how, n):
    """A sequence's rows with n wrong ones among them."""
    wrong = rows[20 : 20 + n]
    if how == "too few":
        return rows[:20] + rows[20 + n :]
    for row in wrong:
        if how == "another position":
            row.pos, row.delta = row.pos + 1, row.delta + 1
        else:
            row.v = rows[3].v
    return rows


@pytest.mark.parametrize("how", ["too few", "another position", "another value"])
@pytest.mark.parametrize("dtype", AXES["dtype"])
def test_a_wrong_cell_is_seen(dtype, how):
    """Tolerances are below what the least mistake does to one of a few queries.

    With keys by channel, whose groups the oracle does not follow, 32 cells of 160 are wrong.
    """
    cell = Cell(dtype=dtype)
    n_prompt, n = (160, 32) if dtype == "kivi4" else (40, 1)
    right, wrong = PlainSeq(cell, None, None), PlainSeq(cell, None, None)
    right.hold(drawn(2, n_prompt))
    wrong.hold(drawn(2, n_prompt))
    wrong.rows = damaged(wrong.rows, how, n)
    off = [np.abs(right.step([i]) - wrong.step([i])).max() for i in range(6)]
    assert max(off) > max(tolerance(cell), tolerance(Cell("attention_sinks", dtype=dtype)))


def test_the_oracle_reads_what_it_chose():
    """Of sparse reads: what a step of one token reads of a text that has more, and no other."""
    dense, sparse = (PlainSeq(Cell(attention=x), None, None) for x in ("xla", "sparse"))
    for seq in (dense, sparse):
        seq.hold(drawn(2, N_READ))
    assert np.abs(dense.step([1]) - sparse.step([1])).max() == 0
    assert np.abs(dense.step([2]) - sparse.step([2])).max() > 10 * TOLERANCE["f32"]
    assert np.abs(dense.step([3, 4]) - sparse.step([3, 4])).max() == 0


def test_the_page_of_what_is_supported_is_up_to_date():
    assert support.PAGE.read_text() == support.page(), "run python -m scripts.support"

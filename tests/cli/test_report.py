"""The summary, JSON and cell map from numbers that are given, without a model."""

import dataclasses
import io
import json
import re
import types

import numpy as np
import pytest

from kvrt import cells as meaning
from kvrt.attention.choice import AttentionChoice
from kvrt.cache.stats import DropEvent, LostCheckpoint, Stats
from kvrt.cli.process import output
from kvrt.cli.report import summary

STATS = Stats(
    n_ctx=200,
    n_kv=70,
    cells_used=69,
    n_shift=0,
    n_kshift=0,
    n_extend=0,
    n_dropped=0,
    n_defrag=1,
    n_compiles=1,
    n_from_disk=0,
    compile_s=0.5,
    cache_bytes=1_234_567,
    attention=AttentionChoice("chunked", "no kernel for cpu"),
    drops=(),
)
OUTCOME = summary.Outcome(
    model="m",
    n_prompt=10,
    n_prefilled=10,
    n_generated=21,
    finish_reason="stop",
    stats=STATS,
    prefill_s=0.5,
    decode_s=4.0,
)


def shifted(n: int) -> Stats:
    """n context shifts of 30 of 64 tokens, each after the tokens that fill the cache again."""
    drops = tuple(DropEvent(seq_id=0, n_past=64, n_dropped=30) for _ in range(n))
    return dataclasses.replace(STATS, n_shift=n, n_dropped=30 * n, drops=drops)


def test_summary_counts_and_rates():
    assert summary.summary(OUTCOME) == [
        "prompt     10 tokens in 0.50 s, 20.0 tokens/s",
        "generated  21 tokens in 4.00 s, 5.0 tokens/s; end of text",
        "compiled   1 program in 0.50 s, not counted above, whole",
        "attention  chunked: no kernel for cpu",
        "cache      69 of 200 cells used, n_kv 70, 1.2 MB of f32",
        "upkeep     0 context shifts, 0 tokens dropped, 1 defrag",
    ]


def test_every_number_of_a_summary_has_commas():
    drop = DropEvent(seq_id=0, n_past=6400, n_dropped=3000)
    stats = dataclasses.replace(
        shifted(1500), n_ctx=8192, n_kv=7000, cells_used=6900, n_defrag=1100, drops=(drop,) * 1500
    )
    many = {"n_prompt": 50_000, "n_prefilled": 40_000, "n_generated": 21_000, "seed": None}
    lines = summary.summary(dataclasses.replace(OUTCOME, stats=stats, prefill_s=50.0, **many))
    assert "6,900 of 8,192 cells used, n_kv 7,000" in lines[4]
    assert "1,500 context shifts, 45,000 tokens dropped, 1,100 defrags" in lines[5]
    assert not [line for line in lines if re.search(r"(?<![.,\d])\d{4,}(?!\.)", line)], lines


def test_states_are_not_called_cells():
    stats = dataclasses.replace(STATS, unit="state", n_ctx=1, n_kv=1, cells_used=1)
    lines = summary.summary(dataclasses.replace(OUTCOME, stats=stats))
    assert lines[4] == "cache      1 of 1 state used, 1.2 MB of f32"


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (0, "3 programs in 0.50 s, not counted above, whole"),
        (2, "3 programs in 0.50 s, 2 of them from the disk, not counted above, whole"),
        (3, "3 programs in 0.50 s, all from the disk, not counted above, whole"),
    ],
)
def test_summary_says_which_programs_came_from_the_disk(n, said):
    stats = dataclasses.replace(STATS, n_compiles=3, n_from_disk=n)
    lines = summary.summary(dataclasses.replace(OUTCOME, stats=stats))
    assert lines[2] == f"compiled   {said}"


def test_summary_of_a_prompt_that_was_cut_short():
    cut = dataclasses.replace(
        OUTCOME, n_prefilled=5, n_generated=0, decode_s=0.0, finish_reason="interrupted"
    )
    assert summary.summary(cut)[:2] == [
        "prompt     5 of 10 tokens in 0.50 s, 10.0 tokens/s",
        "generated  0 tokens in 0.00 s; interrupted",
    ]


def test_summary_says_when_tokens_were_dropped():
    lines = summary.summary(dataclasses.replace(OUTCOME, stats=shifted(2)))
    assert lines[-3:] == [
        "upkeep     2 context shifts, 60 tokens dropped, 1 defrag",
        "           30 of 64 dropped after 55 generated",
        "           30 of 64 dropped after 85 generated",
    ]


def test_summary_says_which_checkpoints_there_are_and_which_went():
    lost = [(16, "evicted"), (48, "changed"), (32, "evicted"), *((x, "cut") for x in range(7))]
    gone = tuple(LostCheckpoint(seq_id=0, pos=pos, reason=why) for pos, why in lost)
    stats = dataclasses.replace(STATS, n_checkpoints=2, checkpoint_bytes=3_400_000)
    assert summary.checkpoint_line(stats) == "2 context checkpoints, 3.4 MB"
    stats = dataclasses.replace(stats, lost_checkpoints=gone)
    line = "2 context checkpoints, 3.4 MB; lost: 16, 32 evicted for newer ones; "
    line += "48 as tokens before it were dropped or moved; 0, 1, 2, 3, 4 and 2 more behind a cut"
    assert f"           {line}" in summary.summary(dataclasses.replace(OUTCOME, stats=stats))
    told = json.loads(summary.outcome_json(dataclasses.replace(OUTCOME, stats=stats)))
    assert told["n_checkpoints"] == 2 and told["lost_checkpoints"][1] == {
        "pos": 48,
        "reason": "changed",
    }


def test_drops_while_the_prompt_is_read_are_told_by_its_tokens():
    # Of 100 tokens 64 were read when the first 30 went, 94 at the second, all at the third.
    assert summary.drop_lines(100, shifted(3)) == [
        "30 of 64 dropped after 64 of the prompt's tokens",
        "30 of 64 dropped after 94 of the prompt's tokens",
        "30 of 64 dropped after 25 generated",
    ]


CUT = [(6, "after 205 generated"), (7, "and 2 more"), (40, "and 35 more")]


@pytest.mark.parametrize(("n", "end"), CUT)
def test_many_drops_are_cut_short(n, end):
    found = summary.drop_lines(10, shifted(n))
    assert len(found) == 6 and found[-1].endswith(end)


def test_a_rate_of_nothing_is_null_in_json():
    told = json.loads(
        summary.outcome_json(dataclasses.replace(OUTCOME, n_generated=1, decode_s=0.0))
    )
    assert told["decode_tps"] is None and told["prefill_tps"] == 20.0


def test_a_probability_of_zero_is_null_in_json():
    told = dataclasses.replace(
        OUTCOME,
        tokens=[3],
        n_generated=1,
        logprobs=[((3, -0.5), (1, -np.inf))],
        texts={3: " a", 1: "b"},
    )
    best = [{"id": 3, "text": " a", "logprob": -0.5}, {"id": 1, "text": "b", "logprob": None}]
    assert json.loads(summary.outcome_json(told))["logprobs"] == [
        {"id": 3, "text": " a", "best": best}
    ]


def test_the_seed_is_named_where_it_decides():
    told = dataclasses.replace(OUTCOME, seed=7)
    assert json.loads(summary.outcome_json(told))["seed"] == 7
    assert summary.summary(told)[1].endswith("; seed 7")
    assert json.loads(summary.outcome_json(OUTCOME))["seed"] is None
    assert "seed" not in "".join(summary.summary(OUTCOME))


def owned(n_ctx: int, owners: dict[int, list[int]]) -> meaning.Cells:
    """Cells by their owners; the position of each is its number."""
    cells = meaning.create(n_ctx, 64)
    for cell, seqs in owners.items():
        one = np.array([cell], np.int32)
        cells = meaning.place(cells, one, one, np.array([seqs[0]], np.int32))
        for other in seqs[1:]:
            cells = meaning.seq_cp(cells, seqs[0], other, cell, cell + 1)
    return cells


def test_the_cell_map_tells_owners_apart():
    cells = owned(12, {0: [0], 1: [9], 2: [10], 3: [35], 4: [36], 5: [63], 7: [0, 40], 11: [1]})
    assert summary.cell_map(cells, 6) == ["09az++", ".M...1"]


def test_equal_rows_are_told_once(capfd):
    used = {"cells_used": 2, "n_kv": 320, "n_ctx": 320}
    summary.print_cells(owned(320, {0: [0], 319: [0]}), dataclasses.replace(STATS, **used))
    out, err = capfd.readouterr()
    rows = err.splitlines()
    assert out == "" and rows[:4] == [
        "  0 0" + "." * 63,
        " 64 " + "." * 64,
        "  *",
        "256 " + "." * 63 + "0",
    ]
    assert len(rows) == 5 and rows[4].startswith("cells: 2 of 320 cells used, n_kv 320;")


class Terminal(io.StringIO):
    """A terminal's standard error."""

    def isatty(self):
        return True


def test_the_bar_of_a_prompt_has_a_rate_and_the_time_left(monkeypatch):
    shown, seconds = Terminal(), iter(range(3))
    monkeypatch.setattr("sys.stderr", shown)
    clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr(summary, "time", clock)
    monkeypatch.setenv("TERM", "xterm")
    with summary.prefill_bar(4000, True) as show:
        show(500)
        show(1500)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert re.search(r"1500/4000 750 tokens/s \S*:\S* left", text), text


def test_what_is_waited_for_is_shown_however_short_the_wait_is(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with output.waiting("compiling", wanted=True) as say:
        say("reading")
    assert 0 < shown.getvalue().index("compiling") < shown.getvalue().index("reading")


@pytest.mark.parametrize(
    ("seconds", "wanted", "n"), [(0.0, True, 2), (60.0, True, 0), (0.0, False, 0)]
)
def test_a_prompt_tells_its_progress_without_a_terminal(capfd, monkeypatch, seconds, wanted, n):
    monkeypatch.setattr(output, "LINE_S", seconds)
    with summary.prefill_bar(54_365, wanted) as show:
        show(1024)
        show(2048)
    lines = capfd.readouterr().err.splitlines()
    begins = ("prompt     1,024 of 54,365 tokens, ", "prompt     2,048 of 54,365 tokens, ")
    assert len(lines) == n and all(map(str.startswith, lines, begins))

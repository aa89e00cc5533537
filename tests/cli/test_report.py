"""The summary, JSON and cell map from numbers that are given, without a model."""

import dataclasses
import io
import json
import re
import types

import msgspec
import numpy as np
import pytest

from kvrt import CacheConfig, SelfExtend, session
from kvrt import cells as meaning
from kvrt.attention.choice import AttentionChoice
from kvrt.cache.stats import DropEvent, LostCheckpoint, Stats
from kvrt.cli.process import output
from kvrt.cli.report import summary
from kvrt.cli.report.tables import signs
from kvrt.options.select import Quest
from kvrt.policies import SCORED, policy_name
from kvrt.policies.scored import H2O, DuoAttention, SparseWindow

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
    assert signs(np.asarray(cells.seqs), 6) == ["09az++", ".M...1"]


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


LONG = ("--ignore_eos", "--temp", 0, "-n", 90, "--dtype", "f32")
NEWEST = ("--select_sink", 0, "--select_recent", 1)
# Flags of a run, the reason that it tells, and the first token that it concerns.
WAYS = {
    "context shift": (("-c", 64), "context_shift", 63),
    "attention sinks": (("-c", 64, "--policy", "attention_sinks"), "attention_sinks", 64),
    "score": (("--policy", "h2o", "--policy_budget", 48, "--policy_interval", 16), "h2o", 64),
    "SelfExtend": (("-gan", 4, "-gaw", 32), "self_extend", 32),
    "SelfExtend as in the paper": (
        ("-gan", 4, "-gaw", 32, "--self_extend", "paper"),
        "self_extend",
        32,
    ),
    "sparse reads": (
        (*("--select", "quest", "--select_cells", 32, "--select_dense", 0), *NEWEST),
        "quest",
        33,
    ),
}


def reasons(n_computed, *, config=None, scored=None, **counts):
    made = summary.AnswerCounts(
        n_prompt=counts.pop("n_prompt", 10), n_computed=n_computed, **counts
    )
    found = summary.approximations(made, config or CacheConfig(), scored)
    return [(x.by, x.from_token) for x in found]


@pytest.mark.parametrize(
    ("scored", "first"),
    [
        (H2O(budget=64, interval=16), 80),
        (SparseWindow(budget=64, interval=16), 80),
        (SparseWindow(budget=64, interval=16, n_read=32, refresh_every=8), 32),
        (DuoAttention(budget=96, n_stream=48, streaming=((0,),)), 112),
        (DuoAttention(budget=96, n_stream=48, streaming=((),)), 160),
        (H2O(budget=96, interval=16, n_recent=9, pyramid=1.5), 64),
    ],
    ids=str,
)
def test_a_policy_by_score_is_told_once_a_head_has_let_go_of_a_token(scored, first):
    assert reasons(first, scored=scored) == []
    assert reasons(first + 1, scored=scored) == [(policy_name(scored), first)]
    # A prompt that was read whole is exact up to its end.
    assert reasons(301, scored=scored, n_compressed=300) == [(policy_name(scored), 300)]


def test_rounds_of_self_extend_wait_for_a_step_of_the_prompt():
    config = CacheConfig(n_ubatch=64, self_extend=SelfExtend(ga_n=4, ga_w=40))
    assert reasons(64, n_prompt=100, config=config) == []
    assert reasons(65, n_prompt=100, config=config) == [("self_extend", 64)]
    assert reasons(65, n_prompt=10, config=config) == [("self_extend", 40)]
    # What a session holds may have been written token by token.
    assert reasons(65, n_prompt=100, n_restored=50, config=config) == [("self_extend", 40)]
    off = CacheConfig(self_extend=SelfExtend(ga_n=1, ga_w=40))
    assert reasons(9000, config=off) == []


def test_sparse_reads_begin_behind_the_prompt_and_the_budget():
    config = CacheConfig(select=Quest(n_cells=96))
    assert reasons(97, config=config) == []
    assert reasons(98, config=config) == [("quest", 97)]
    assert reasons(201, n_prompt=200, config=config) == [("quest", 200)]


def test_reasons_stand_in_the_order_of_the_text():
    drop = summary.Approximation(by="context_shift", from_token=40, n_dropped=1234)
    part = summary.reused_part(7, "session")
    assert summary.reused_part(None, "session") is None
    assert reasons(50, drop=drop, reused=part) == [("session", 7), ("context_shift", 40)]
    # What was dropped for a token that was never computed concerns no token of the answer.
    assert reasons(40, drop=drop, reused=part) == [("session", 7)]
    made = summary.AnswerCounts(n_prompt=10, n_computed=50, drop=drop, reused=part)
    found = summary.approximations(made, CacheConfig(), None)
    assert summary.exactness_lines([]) == []
    assert summary.exactness_lines(found) == [
        "exactness  approximate from token 7 on: the session's tokens were moved, blended or "
        "sampled by sparse reads (session)",
        "           approximate from token 40 on: 1,234 older tokens were dropped (context_shift)",
    ]
    assert msgspec.to_builtins(found) == [
        {"by": "session", "from_token": 7},
        {"by": "context_shift", "from_token": 40, "n_dropped": 1234},
    ]


def test_states_that_keep_what_was_dropped_are_told():
    drop = summary.Approximation(by="context_shift", from_token=4, n_dropped=2, on_states="keep")
    said = "2 older tokens were dropped, recurrent states keep them (context_shift)"
    assert drop.line == f"approximate from token 4 on: {said}"
    told = {"by": "context_shift", "from_token": 4, "n_dropped": 2}
    assert msgspec.to_builtins(drop) == {**told, "on_states": "keep"}


def test_every_policy_has_the_name_of_its_flag():
    assert [policy_name(kind(budget=512)) for kind in SCORED.values()] == list(SCORED)


@pytest.fixture(scope="module")
def whole():
    """The tokens of the whole text, once they are known."""
    return []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_tells_why_its_text_is_another(go, whole, way):
    if not whole:
        told = json.loads(go("-c", 256, *LONG, "--json").out)
        assert (told["approximate"], told["approximations"]) == (False, [])
        whole += told["tokens"]
    flags, by, first = WAYS[way]
    done = go("-c", 256, *LONG, *flags, "--json")
    told = json.loads(done.out)
    (reason,) = told["approximations"]
    assert told["approximate"] and (reason["by"], reason["from_token"]) == (by, first)
    assert done.err.startswith(f"exactness  approximate from token {first} on: ")
    # The token behind it is the first that may be another one.
    pairs = zip(whole, told["tokens"], strict=True)
    n_same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(whole))
    assert n_same >= first - told["n_prompt"] + 1


@pytest.mark.slow
def test_an_answer_without_a_part_of_the_session_says_so(kvrt, tiny, prefilled, tmp_path):
    """Three questions: the first two answers are short, the third outgrows the context."""
    asked = ["ask", "-m", tiny, "--temp", 0, "--ignore_eos", prefilled]
    short = json.loads(kvrt(*asked, "what?", "-n", 8, "--json").out)
    assert (short["approximate"], short["approximations"]) == (False, [])
    done = kvrt(*asked, "what?", "-n", 40, "--json")
    told = json.loads(done.out)
    assert told["approximations"] == [
        {"by": "context_shift", "from_token": 63, "n_dropped": told["n_dropped"]}
    ]
    line = f"approximate from token 63 on: {told['n_dropped']} older tokens were dropped"
    assert done.err.count(line) == 1
    quiet = kvrt(*asked, "what?", "-n", 40, "--quiet").err
    assert quiet == f"kvrt: warning: the answer is {line} (context_shift); raise -c to keep them\n"
    questions = tmp_path / "questions.txt"
    questions.write_text("what?\nwhat?\n")
    done = kvrt(*asked, "-F", questions, "-n", 40, "--json")
    for answer in map(json.loads, done.out.splitlines()):
        # Each answer counts its own drops.
        assert answer["approximations"] == told["approximations"]
        assert answer["n_shift"] == told["n_shift"]


@pytest.mark.slow
def test_a_session_whose_text_was_shifted_says_so_later(kvrt, go, tiny, tmp_path):
    path = tmp_path / "shifted.kv"
    done = go(*LONG, "-c", 64, "--session", path, "--session_all", "--keep", 5)
    assert done.code == 0, done.err
    n_exact = session.read_manifest(path).exact[0]
    done = kvrt("ask", "-m", tiny, path, "what?", "-n", 4, "--temp", 0, "--json")
    (first, *_) = json.loads(done.out)["approximations"]
    assert first == {"by": "session", "from_token": n_exact}
    assert f"exactness  approximate from token {n_exact} on: the session's tokens" in done.err


@pytest.mark.slow
def test_results_of_a_batch_tell_why_their_text_is_another(kvrt, tiny, tmp_path):
    line = {"id": "long", "prompt": "the sand", "n_predict": 90}
    lines = [line, line | {"id": "short", "n_predict": 5}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    words = ["batch", "-m", tiny, "-i", tmp_path / "in.jsonl", "--temp", 0, "--ignore_eos"]
    words += ["-c", 256, "--n_ctx_seq", 64, "--policy", "context_shift", "--dtype", "f32"]
    words += ["--n_batch", 8, "--n_seq_max", 2, "--block_size", 8]
    done = kvrt(*words, "-o", tmp_path / "out.jsonl")
    found = [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    short, long = sorted(found, key=lambda x: len(x["tokens"]))
    assert "approximate" not in short
    assert long["approximate"] and long["approximations"] == [
        {"by": "context_shift", "from_token": 63, "n_dropped": long["n_dropped"]}
    ]
    line = "exactness  answers that are not of the whole text: 1 by context_shift\n"
    assert done.err.count(line) == 1

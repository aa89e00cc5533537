"""An answer that is not that of the whole text says so: why, and from which token on."""

import json

import pytest

from kvrt import CacheConfig, SelfExtend, session
from kvrt.cli.report.summary import (
    AnswerCounts,
    Approximation,
    approximations,
    exactness_fields,
    exactness_lines,
    reused_part,
)
from kvrt.options.select import Quest
from kvrt.policies import SCORED, policy_name
from kvrt.policies.scored import H2O, DuoAttention, SparseWindow

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
    made = AnswerCounts(n_prompt=counts.pop("n_prompt", 10), n_computed=n_computed, **counts)
    found = approximations(made, config or CacheConfig(), scored)
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
    drop = Approximation(by="context_shift", from_token=40, n_dropped=1234)
    part = reused_part(7, "session")
    assert reused_part(None, "session") is None
    assert reasons(50, drop=drop, reused=part) == [("session", 7), ("context_shift", 40)]
    # What was dropped for a token that was never computed concerns no token of the answer.
    assert reasons(40, drop=drop, reused=part) == [("session", 7)]
    made = AnswerCounts(n_prompt=10, n_computed=50, drop=drop, reused=part)
    found = approximations(made, CacheConfig(), None)
    assert exactness_lines([]) == []
    assert exactness_lines(found) == [
        "exactness  approximate from token 7 on: the session's tokens were moved, blended or "
        "sampled by sparse reads (session)",
        "           approximate from token 40 on: 1,234 older tokens were dropped (context_shift)",
    ]
    assert exactness_fields([]) == {"approximate": False, "approximations": []}
    assert exactness_fields(found)["approximations"] == [
        {"by": "session", "from_token": 7},
        {"by": "context_shift", "from_token": 40, "n_dropped": 1234},
    ]


def test_states_that_keep_what_was_dropped_are_told():
    drop = Approximation(by="context_shift", from_token=4, n_dropped=2, states=True)
    said = "2 older tokens were dropped, recurrent states keep them (context_shift)"
    assert drop.line == f"approximate from token 4 on: {said}"
    told = {"by": "context_shift", "from_token": 4, "n_dropped": 2}
    assert drop.fields == {**told, "on_states": "keep"}


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

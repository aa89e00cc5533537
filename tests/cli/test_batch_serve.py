"""Requests between their file and an engine, which is a script here."""

import dataclasses
import json
import shutil
from collections import deque

import pytest
from conftest import vocabulary

from kvrt.cli.batch import progress
from kvrt.cli.batch.progress import rows
from kvrt.cli.batch.requests import Requests
from kvrt.cli.batch.results import Results
from kvrt.cli.batch.server import AnswerLimits, Server
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import output
from kvrt.errors import BadRequest, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.serving.engine import Engine
from kvrt.serving.metrics import Metrics, PoolUse
from kvrt.serving.outputs import Output
from kvrt.serving.request import Request
from kvrt_models import load

# The vocabulary begins with the 256 bytes.
EOS = len(vocabulary()) - 1


@dataclasses.dataclass
class Script(Engine):
    """Tells what it was given, a step at a time; ids that begin with x are refused."""

    steps: list[list[Output]]
    asked: list[Request] = dataclasses.field(default_factory=list)
    cancelled: list[tuple[str, int | None, str]] = dataclasses.field(default_factory=list)

    @property
    def has_work(self):
        return bool(self.steps)

    def add_request(self, request):
        if request.id.startswith("x"):
            raise BadRequest(f"request {request.id!r}: no")
        self.asked.append(request)

    def step(self):
        return self.steps.pop(0)

    def cancel(self, request_id, sample=None, *, reason="cancelled"):
        self.cancelled.append((request_id, sample, reason))


def told(name, text, reason=None, *, sample=0, n_cached=0, error=None):
    return Output(
        id=name,
        sample=sample,
        tokens=tuple(text.encode()),
        finish_reason=reason,
        n_cached=n_cached,
        error=error,
    )


@pytest.fixture
def serve(tmp_path, tiny):
    """A server of these lines and steps, after all steps."""

    def made(lines, steps, n_most=99, **flags):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = Requests(str(path), BatchOptions(**flags))
        results = Results(str(tmp_path / "out.jsonl"), {e.id: e.n for e in found.entries})
        script = Script(steps)
        limits = AnswerLimits(n_ctx_train=8, config=CacheConfig())
        server = Server(script, tokenizer, found, results, limits=limits)
        closing.extend([found, results])
        todo = deque(found.entries)
        server.feed(todo, n_most)
        while script.has_work:
            server.step()
            server.feed(todo, n_most)
        written = (tmp_path / "out.jsonl").read_text().splitlines()
        return server, script, [json.loads(line) for line in written]

    closing, tokenizer = [], load.open_tokenizer(tiny)
    yield made
    for file in closing:
        file.close()


def short(records):
    return [(r["id"], r.get("sample"), r["text"], r["finish_reason"]) for r in records]


def test_a_request_is_what_its_line_and_the_flags_say(serve):
    lines = [
        {"id": "a", "prompt": "abc", "temp": 0, "seed": 7, "priority": -1},
        {"id": "b", "tokens": [5], "n_predict": 3, "ignore_eos": True, "n": 2, "quota": 9},
    ]
    lines[0] |= {"quota": 32, "reserve": 8}
    _, script, _ = serve(lines, [], n_predict=4, top_k=3)
    a, b = script.asked
    assert (a.tokens, a.n_predict, a.stop_ids, a.n, a.priority) == ((97, 98, 99), 4, (EOS,), 1, -1)
    assert (a.sampling.temp, a.sampling.seed, a.sampling.top_k) == (0, 7, 3)
    assert (b.tokens, b.n_predict, b.stop_ids, b.n) == ((5,), 3, (), 2)
    assert (a.quota, a.reserve, b.quota, b.reserve) == (32, 8, 9, 0)
    assert (b.sampling.temp, b.sampling.top_p, b.sampling.min_p) == (0.8, 0.95, 0.05)


def test_a_line_with_beams_samples_nothing_and_tells_scores(serve):
    lines = [
        {"id": "a", "prompt": "ab", "num_beams": 3, "n": 2, "early_stopping": "never"},
        {"id": "b", "prompt": "ab", "num_beams": 2, "temp": 0.5},
        {"id": "c", "prompt": "ab"},
    ]
    texts = [told("a", x, "stop", sample=i)._replace(score=-i - 0.5) for i, x in enumerate("xy")]
    _, script, records = serve(lines, [[*texts, told("c", "z", "length")]])
    a, c = script.asked
    assert (a.num_beams, a.n, a.early_stopping, a.length_penalty) == (3, 2, "never", 1.0)
    assert (a.sampling.temp, c.num_beams, c.sampling.temp) == (0, 1, 0.8)
    assert [(r["id"], r.get("score")) for r in records] == [
        ("b", None),
        ("a", -0.5),
        ("a", -1.5),
        ("c", None),
    ]
    assert "num_beams is 2 and temp 0.5: a beam search" in records[0]["error"]


def test_ids_that_are_numbers_stay_numbers(serve, tmp_path):
    lines = [
        {"id": 7, "prompt": "a"},
        {"id": "7", "prompt": "a"},
        {"id": -3, "prompt": "b", "n": 2},
    ]
    ends = [told(name, "x", "length", sample=i) for name, i in (("7", 0), ("-3", 0), ("-3", 1))]
    _, script, records = serve(lines, [ends])
    assert [r.id for r in script.asked] == ["7", "-3"]
    assert [(r["id"], r.get("sample")) for r in records] == [(7, None), (-3, 0), (-3, 1)]
    found = Requests(str(tmp_path / "in.jsonl"), BatchOptions())
    # 7 and "7" are one name where people read them.
    (bad,) = found.bad
    assert (bad.id, bad.line) == ("7", 2) and "its id is that of line 1" in bad.error
    found.close()
    # The file itself belongs to the server that wrote it.
    again = shutil.copy(tmp_path / "out.jsonl", tmp_path / "again.jsonl")
    results = Results(str(again), {e.id: e.n for e in found.entries})
    assert results.done == {7, -3}
    results.close()
    with pytest.raises(UsageError, match="is of request 7, which -i has not"):
        Results(str(again), {"7": 1, -3: 2})


def test_a_random_seed_is_told_with_the_result(serve):
    lines = [
        {"id": "a", "prompt": "a", "seed": -1},
        {"id": "b", "prompt": "a", "seed": 5},
        {"id": "c", "prompt": "a", "seed": -1, "temp": 0},
        {"id": "d", "prompt": "a"},
    ]
    ends = [told(name, "x", "length") for name in "abcd"]
    _, script, records = serve(lines, [ends], seed=-1)
    seeds = {r.id: r.sampling.seed for r in script.asked}
    assert {r["id"]: r["seed"] for r in records if "seed" in r} == {k: seeds[k] for k in "ad"}
    assert seeds["a"] != seeds["d"] and seeds["b"] == 5


def test_results_come_as_requests_end(serve):
    lines = [{"id": name, "prompt": "abcd"} for name in "ab"]
    steps = [
        [told("a", "x", n_cached=3), told("b", "y")],
        [told("b", "z", "length")],
        [told("a", "w", "stop", n_cached=3)],
    ]
    server, _, records = serve(lines, steps)
    assert records == [
        {"id": "b", "tokens": [121, 122], "text": "yz", "finish_reason": "length", "n_cached": 0},
        {"id": "a", "tokens": [120, 119], "text": "xw", "finish_reason": "stop", "n_cached": 3},
    ]
    counts = server.counts
    assert (counts.n_done, counts.n_failed, counts.n_sampled) == (2, 0, 4)
    assert server.n_live == 0


def test_samples_of_a_request_are_written_together(serve):
    steps = [
        [told("a", "x", "stop", sample=1), told("a", "y", sample=0)],
        [told("b", "q", "stop")],
        [told("a", "z", "length", sample=0), told("a", "p", "stop", sample=2)],
    ]
    lines = [{"id": "a", "prompt": "ab", "n": 3}, {"id": "b", "prompt": "c"}]
    _, _, records = serve(lines, steps)
    assert short(records) == [
        ("b", None, "q", "stop"),
        ("a", 0, "yz", "length"),
        ("a", 1, "x", "stop"),
        ("a", 2, "p", "stop"),
    ]


def test_who_is_refused_fails_alone(serve):
    lines = [{"id": "xa", "prompt": "a"}, {"id": "b", "prompt": "a"}, {"id": "xc", "prompt": "a"}]
    server, script, records = serve(lines, [[told("b", "y", "stop")]])
    assert [r.id for r in script.asked] == ["b"]
    assert [(r["id"], r.get("error")) for r in records] == [
        ("xa", "request 'xa': no"),
        ("xc", "request 'xc': no"),
        ("b", None),
    ]
    assert (server.counts.n_done, server.counts.n_failed) == (3, 2)


def test_a_template_that_is_missing_fails_alone(serve):
    lines = [{"id": "a", "prompt": "a", "chat": True}, {"id": "b", "prompt": "b"}]
    _, script, records = serve(lines, [[told("b", "y", "stop")]])
    assert [r.id for r in script.asked] == ["b"]
    assert "no chat template" in records[0]["error"] and records[0]["finish_reason"] == "error"


def test_a_stop_text_ends_a_request(serve):
    lines = [{"id": "a", "prompt": "a", "stop": ["xy", "q"]}]
    steps = [[told("a", "bx")], [told("a", "y")], [told("a", "", "cancelled")]]
    server, script, records = serve(lines, steps)
    # The tokens that made the text up are told, the text that ends it is not.
    (record,) = records
    assert (record["tokens"], record["text"]) == ([98, 120, 121], "b")
    assert record["finish_reason"] == "stop_string"
    assert (script.cancelled, server.counts.n_done) == ([("a", 0, "stop")], 1)


def test_what_might_begin_a_stop_text_is_not_lost(serve):
    lines = [{"id": "a", "prompt": "a"}]
    _, script, records = serve(lines, [[told("a", "bx")], [told("a", "", "length")]], stop=("xy",))
    assert (records[0]["text"], script.cancelled) == ("bx", [])


def test_a_stop_text_in_one_sample_leaves_the_others(serve):
    lines = [{"id": "a", "prompt": "a", "n": 2, "stop": "x"}]
    steps = [
        [told("a", "bx"), told("a", "b", sample=1)],
        [told("a", "", "cancelled"), told("a", "c", sample=1)],
        [told("a", "d", "length", sample=1)],
    ]
    _, script, records = serve(lines, steps)
    assert short(records) == [("a", 0, "b", "stop_string"), ("a", 1, "bcd", "length")]
    assert records[0]["tokens"] == [98, 120]
    # At once, and only that one.
    assert script.cancelled == [("a", 0, "stop")]


def test_an_error_in_one_sample_fails_the_request(serve):
    lines = [{"id": "a", "prompt": "a", "n": 2}, {"id": "b", "prompt": "b"}]
    steps = [
        [told("a", "b", "stop")],
        [told("a", "", "error", sample=1, error="no room"), told("b", "c", "stop")],
    ]
    _, script, records = serve(lines, steps)
    assert [(r["id"], r.get("error"), r["tokens"]) for r in records] == [
        ("a", "no room", []),
        ("b", None, [99]),
    ]
    # Both samples had ended, so nothing is cancelled.
    assert script.cancelled == []


def test_samples_beside_one_that_failed_are_given_up(serve):
    lines = [{"id": "a", "prompt": "a", "n": 2}]
    steps = [
        [told("a", "", "error", error="no room"), told("a", "b", sample=1)],
        [told("a", "", "cancelled", sample=1)],
    ]
    _, script, records = serve(lines, steps)
    assert [r["error"] for r in records] == ["no room"]
    assert script.cancelled == [("a", 1, "cancelled")]


def test_an_engine_knows_of_so_many_requests(serve):
    lines = [{"id": str(i), "prompt": "a"} for i in range(5)]
    steps = [[told(str(i), "b", "stop")] for i in range(3)]
    server, script, _ = serve(lines, steps, n_most=2)
    assert [r.id for r in script.asked] == ["0", "1", "2", "3", "4"]
    assert server.n_live == 2


def test_requests_longer_than_the_model_was_trained_for_are_counted(serve):
    lines = [{"id": "a", "prompt": "abcd", "n_predict": 4}]
    lines.append({"id": "b", "prompt": "abcd", "n_predict": 5})
    assert serve(lines, [])[0].counts.n_long == 1


def test_a_file_that_changes_ends_everything(serve, tmp_path):
    server, _, _ = serve([{"id": "a", "prompt": "a"}], [])
    entry = server._requests.entries[0]
    (tmp_path / "in.jsonl").write_text('{"id": "z", "prompt": "a"}\n')
    with pytest.raises(UsageError, match="line 1 was changed"):
        server.feed(deque([entry]))


def stats_of(asked, hit):
    """Stats of an engine that found so many of the tokens that it was asked for."""
    stats = Metrics().snapshot(n_running=0, n_waiting=0, pools=(PoolUse(n_units=8, n_free=6),))
    prefix = dict(stats.prefix) | {"asked": asked, "hit": hit}
    return dataclasses.replace(stats, prefix=prefix)


def test_lines_tell_progress_where_there_is_no_terminal(capfd, monkeypatch):
    counts = progress.BatchCounts(n_done=3, n_sampled=1234, seconds=10)
    for seconds, n in ((0.0, 2), (60.0, 0)):
        monkeypatch.setattr(output, "LINE_S", seconds)
        with progress.progress_of(40, to_stdout=True) as show:
            for _ in range(2):
                show(counts, lambda: stats_of(1000, 425))
        line = "requests   3 of 40 done, 1,234 tokens, 123.4 tokens/s, cache 25 %, hits 42.5 %\n"
        assert capfd.readouterr() == ("", line * n)


def test_one_run_tells_one_share_of_prefix_hits():
    """The summary counts as --stats and --metrics do: each request once, whatever its samples."""
    stats = stats_of(1000, 425)
    lines = progress.batch_summary(
        progress.BatchCounts(n_done=1), stats, n_bad=0, n_before=0, n_left=0
    )
    assert sum("425 of 1,000 prompt tokens were prefix hits, 42.5 %" in x for x in lines) == 1
    assert dict(rows(stats))["prefix hits"] == "425 of 1,000 (42.5%) of prompt tokens"


def test_a_result_tells_from_which_token_on_older_ones_were_dropped(serve):
    lines = [{"id": "a", "prompt": "abc", "policy": "context_shift"}, {"id": "b", "prompt": "b"}]
    last = told("a", "y", "length")._replace(n_dropped=2, n_before_drop=4)
    server, _, records = serve(lines, [[told("a", "wxz"), told("b", "y", "length")], [last]])
    why = {"by": "context_shift", "from_token": 4, "n_dropped": 2}
    assert [r.get("approximations") for r in records] == [None, [why]]
    assert [r.get("approximate") for r in records] == [None, True]
    assert server.counts.approximate == {"context_shift": 1}
    lines = progress.batch_summary(server.counts, stats_of(9, 0), n_bad=0, n_before=0, n_left=0)
    assert "exactness  answers that are not of the whole text: 1 by context_shift" in lines

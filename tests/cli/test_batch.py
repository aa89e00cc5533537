"""`kvrt batch` on the tiny model: the text of `kvrt run`, and the same after an interruption."""

import json
from pathlib import Path

import pytest
from test_grp_attn import PAPER
from test_mistakes import fails

from kvrt.cli.batch import engine_run
from kvrt.serving import prometheus

TEXTS = ("the sand of the sea", "the sand of the land", "a mist", "the water and the otter")


@pytest.fixture
def batch(kvrt, tiny, tmp_path):
    """`kvrt batch` on the tiny model; `in.jsonl` holds the requests."""

    def run(*args, lines=None, stdin=b"", out="out.jsonl", given="in.jsonl"):
        if lines is not None:
            text = "".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines)
            (tmp_path / "in.jsonl").write_text(text)
        given = given if given == "-" else tmp_path / given
        out = out if out == "-" else tmp_path / out
        fixed = ["batch", "-m", tiny, "-i", given, "-o", out, "-c", 256, "--n_batch", 8]
        return kvrt(*fixed, "--n_seq_max", 4, "--block_size", 8, *args, stdin=stdin)

    return run


@pytest.fixture
def written(tmp_path):
    """The results, in the order of their ids and samples."""

    def read(out="out.jsonl"):
        lines = (tmp_path / out).read_text().splitlines()
        return sorted(map(json.loads, lines), key=lambda r: (r["id"] or "", r.get("sample", 0)))

    return read


def asked(n=4, **more):
    draws = ({"temp": 0}, {"temp": 1.0, "seed": 5}, {"top_k": 5, "seed": 1}, {"min_p": 0.2})
    return [
        {"id": f"r{i}", "prompt": TEXTS[i % 4], "n_predict": 6 + 3 * i} | draws[i % 4] | more
        for i in range(n)
    ]


def alone(go, line, *more):
    """What `kvrt run` says to the same request."""
    flags = [
        x for k in ("temp", "top_k", "min_p", "seed") if k in line for x in (f"--{k}", line[k])
    ]
    flags = flags if "temp" in line else ["--temp", 0.8, *flags]
    done = go("-p", line["prompt"], "-n", line["n_predict"], *flags, "--json", *more, prompt=False)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_each_request_says_what_it_says_alone(batch, go, written, mode):
    lines = asked()
    done = batch("--mode", mode, lines=lines)
    assert (done.code, done.out) == (0, b""), done.err
    for line, found in zip(lines, written(), strict=True):
        one = alone(go, line)
        assert found["id"] == line["id"] and set(found) == {
            "id", "tokens", "text", "finish_reason", "n_cached", "digest"
        }  # fmt: skip
        assert [found[k] for k in ("tokens", "text", "finish_reason")] == [
            one[k] for k in ("tokens", "text", "finish_reason")
        ]
    assert "requests   4 done\n" in done.err and " tokens/s\n" in done.err
    assert "compiled   " in done.err and "cache      " in done.err


@pytest.mark.slow
def test_beams_are_the_same_in_both_modes_and_after_they_are_cut(batch, tmp_path, written):
    lines = [{"id": "a", "prompt": TEXTS[0], "n_predict": 9, "num_beams": 3, "n": 2}, *asked(2)]
    done = batch("--mode", "paged", lines=lines)
    assert done.code == 0, done.err
    best, second = written()[:2]
    assert best["score"] >= second["score"] and best["tokens"] != second["tokens"]
    whole = written()
    # The same command with fewer beams computes that request anew.
    text = (tmp_path / "in.jsonl").read_text().replace('"num_beams": 3', '"num_beams": 2')
    (tmp_path / "in.jsonl").write_text(text)
    assert batch("--mode", "paged").code == 0
    assert written()[0]["digest"] != best["digest"] and written()[2:] == whole[2:]
    assert batch("--mode", "cell", lines=lines, out="cell.jsonl").code == 0
    for x, y in zip(whole, written("cell.jsonl"), strict=True):
        assert x["tokens"] == y["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_an_endless_request_says_what_a_run_with_a_context_shift_says(batch, go, written, mode):
    line = {"id": "a", "prompt": TEXTS[0], "n_predict": 60, "seed": 4, "temp": 1.0}
    line |= {"ignore_eos": True}
    short = {"id": "b", "prompt": TEXTS[2], "n_predict": 4, "temp": 0, "policy": "none"}
    flags = ["--mode", mode, "--n_ctx_seq", 32, "--policy", "context_shift", "--keep", 2]
    done = batch(*flags, lines=[line, short])
    assert done.code == 0, done.err
    found, other = written()
    one = alone(go, line, "-c", 32, "--keep", 2, "--ignore_eos")
    assert found["tokens"] == one["tokens"] and len(found["tokens"]) == 60
    assert other["tokens"] == alone(go, short)["tokens"]
    # What it could not see is said, in its result and at the end.
    n = found["n_dropped"]
    assert n >= 60 - 32 and "n_dropped" not in other
    assert f"dropped    {n} tokens by policies" in done.err
    # Its line can say all of it; and what it was computed with is in its result.
    said = line | {"policy": "context_shift", "keep": 2}
    again = batch("--mode", mode, "--n_ctx_seq", 32, lines=[said, short], out="said.jsonl")
    assert again.code == 0 and written("said.jsonl")[0]["tokens"] == one["tokens"]
    # The line says what the flags said, so the first results are of it; but not in another context.
    assert "2 were there already" in batch(*flags, "--keep", 9).err
    fails(batch(*flags, "--n_ctx_seq", 40, lines=[line, short]), 2, "other flags")


@pytest.mark.slow
def test_an_endless_request_of_a_hybrid_says_what_a_run_says(kvrt, go, tmp_path, written):
    """States keep what attention drops: the line and the summary say so."""
    folder, asks = Path(__file__).parents[1] / "golden" / "hf" / "bamba", tmp_path / "in.jsonl"
    line = {"id": "a", "prompt": TEXTS[0], "n_predict": 40, "temp": 0, "ignore_eos": True}
    asks.write_text(json.dumps(line) + "\n")
    keep = ["--on_states", "keep", "--keep", 2, "-m", folder]
    for mode in ("paged", "cell"):
        flags = ["-i", asks, "-o", tmp_path / "out.jsonl", "--mode", mode, "--block_size", 8]
        flags += ["--n_ctx_seq", 32, "-c", 64, "--policy", "context_shift"]
        fails(kvrt("batch", *flags, *keep[2:]), 2, "set on_states to 'keep'")
        done = kvrt("batch", *flags, *keep)
        assert done.code == 0, done.err
        (found,) = written()
        one = alone(go, line, "-c", 32, "--ignore_eos", *keep)
        assert found["tokens"] == one["tokens"] and len(found["tokens"]) == 40
        (why,) = found["approximations"]
        assert why == one["approximations"][0] and why["on_states"] == "keep"
        (tmp_path / "out.jsonl").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), [("paged", []), ("cell", PAPER)])
def test_a_request_reads_further_as_a_run_with_the_same_flags_does(batch, go, written, mode, kind):
    lines = [line | {"ignore_eos": True, "n_predict": 40} for line in asked(2)]
    flags = ["-gan", 2, "-gaw", 8, *kind]
    # Rounds come between steps, so that a prompt is one step on both sides.
    done = batch("--mode", mode, *flags, "--n_batch", 16, "--stats", lines=lines)
    assert done.code == 0, done.err
    assert ("rounds of SelfExtend" in done.err) == (not kind)
    sizes = ["--n_ubatch", 16, "--ignore_eos"]
    for line, found in zip(lines, written(), strict=True):
        assert found["tokens"] == alone(go, line, "-c", 256, *sizes, *flags)["tokens"]
    fails(batch("--mode", mode, *kind, lines=lines), 2, "other flags")
    if not kind:
        both = batch(*flags, "--policy", "context_shift", lines=lines, out="both.jsonl")
        fails(both, 2, "SelfExtend in the cache both move positions")


@pytest.mark.slow
def test_a_line_with_a_policy_that_is_none_fails_alone(batch, written):
    lines = [{"id": "a", "prompt": "a", "policy": "h2o"}, {"id": "b", "prompt": "a", "keep": 1}]
    assert batch("-n", 1, lines=lines).code == 1
    assert 'policy is "h2o"; none or context_shift or attention_sinks' in written()[0]["error"]


@pytest.mark.slow
def test_what_requests_have_in_common_is_found(batch, written):
    """The second of two equal prompts, one after the other: 19 tokens are two whole blocks."""
    lines = [{"id": x, "tokens": list(range(40, 59)), "n_predict": 3, "temp": 0} for x in "ab"]
    assert batch("--n_seq_max", 1, lines=lines).code == 0
    first, second = written()
    assert first["tokens"] == second["tokens"]
    assert (first["n_cached"], second["n_cached"]) == (0, 16)
    off = batch("--n_seq_max", 1, "--noprefix_cache", out="off.jsonl")
    assert off.code == 0 and "0 of 38 prompt tokens were prefix hits" in off.err
    assert [r["tokens"] for r in written("off.jsonl")] == [first["tokens"]] * 2


@pytest.mark.slow
def test_samples_are_runs_with_seeds_that_follow(batch, go, written):
    line = {"id": "a", "prompt": TEXTS[0], "n_predict": 8, "seed": 3, "temp": 1.0, "n": 3}
    assert batch(lines=[line]).code == 0
    found = written()
    assert [r["sample"] for r in found] == [0, 1, 2]
    for i, record in enumerate(found):
        assert record["tokens"] == alone(go, line | {"seed": 3 + i})["tokens"]


@pytest.mark.slow
def test_bad_lines_fail_alone_and_the_exit_code_tells(batch, written):
    lines = [
        *asked(1),
        "nonsense\n",
        {"id": "twice", "prompt": "a", "n_predict": 2},
        {"id": "twice", "prompt": "b"},
        {"id": "long", "prompt": "a" * 300},
        {"id": "far", "tokens": [5], "n_predict": 400},
        {"id": "words", "tokens": [5, 300]},
        {"id": "far back", "prompt": "a", "repeat_penalty": 1.1, "repeat_last_n": 9999},
    ]
    done = batch(lines=lines)
    assert done.code == 1
    found = {(r["id"], r.get("line")): r for r in written()}
    assert found["r0", None]["finish_reason"] in ("stop", "length")
    assert len(found["twice", None]["tokens"]) <= 2
    wrong = {k: r["error"] for k, r in found.items() if "error" in r}
    assert set(wrong) == {
        (None, 2), ("twice", 4), ("long", None), ("far", None), ("words", None), ("far back", None)
    }  # fmt: skip
    assert "line 2: no JSON" in wrong[None, 2] and "that of line 3" in wrong["twice", 4]
    assert "token 300 is not in [0, 300)" in wrong["words", None]
    assert all(found[k]["tokens"] == [] and found[k]["text"] == "" for k in wrong)
    assert "6 done, 4 of them failed, 2 lines were no request\n" in done.err
    again = batch()
    assert again.code == 1 and "nothing is left to do" in again.err


@pytest.mark.slow
def test_counters_for_machines(batch, tmp_path, monkeypatch):
    path = tmp_path / "metrics.prom"
    lines = [{"id": x, "tokens": list(range(40, 59)), "n_predict": 3} for x in "ab"]
    flags = ("--n_seq_max", 1, "--metrics", path, "--ignore_eos", "--quiet")
    monkeypatch.setattr(engine_run, "_METRICS_S", 0.0)
    real, n_ended = prometheus.write_metrics, []

    def write(path, stats):
        real(path, stats)
        n_ended.append(sum(stats.finished.values()))

    monkeypatch.setattr(prometheus, "write_metrics", write)
    assert batch(*flags, lines=lines).err == ""
    # After each step, and at the end.
    assert set(n_ended) == {0, 1, 2} and sorted(n_ended) == n_ended
    said = path.read_text().splitlines()
    assert 'kvrt_ended_total{reason="length"} 2.0' in said
    assert 'kvrt_tokens_total{kind="drawn"} 6.0' in said
    assert 'kvrt_prefix_tokens_total{kind="hit"} 16.0' in said
    assert "# TYPE kvrt_running gauge" in said and "kvrt_running 0.0" in said


@pytest.mark.slow
def test_shortage_is_told(batch, written):
    """Three sequences of 60 tokens in 80 cells: not all can go on at once."""
    lines = [{"id": x, "tokens": [i, *range(40, 60)], "n_predict": 40} for i, x in enumerate("abc")]
    flags = ("--ignore_eos", "--temp", 0)
    assert batch(*flags, lines=lines).code == 0
    roomy = [r["tokens"] for r in written()]
    done = batch(*flags, "-c", 80, out="tight.jsonl")
    assert done.code == 0 and " preempted, " in done.err
    assert [r["tokens"] for r in written("tight.jsonl")] == roomy


@pytest.mark.slow
def test_blocks_that_gave_way_are_found_in_tiers(batch, written, tmp_path):
    """Six texts in a cache for two of them, twice: the second time they come from a tier."""
    lines = [
        {"id": f"{x}{i}", "tokens": [i, *range(40, 70)], "n_predict": 4}
        for x in "ab"
        for i in range(6)
    ]
    flags = ("-c", 80, "--n_seq_max", 1, "--temp", 0)
    assert batch(*flags, lines=lines).code == 0
    alone = [r["tokens"] for r in written()]
    tiers = ("--host_cache", "1MB", "--disk_cache", tmp_path / "blocks")
    done = batch(*flags, *tiers, out="host.jsonl")
    assert done.code == 0, done.err
    assert [r["tokens"] for r in written("host.jsonl")] == alone
    assert "\nhost " in done.err and "\ndisk " in done.err
    # A later command finds them on the disk; by its clock it may compute some of them again.
    done = batch(*flags, *tiers, out="disk.jsonl")
    assert [r["tokens"] for r in written("disk.jsonl")] == alone
    assert max(r["n_cached"] for r in written("disk.jsonl") if r["id"].startswith("a")) == 24


@pytest.mark.slow
def test_it_goes_on_where_it_was_cut(batch, tmp_path, written):
    lines = asked(6)
    lines[2] |= {"n": 2}
    assert batch(lines=lines).code == 0
    whole, path = written(), tmp_path / "out.jsonl"
    data = path.read_bytes()
    for part in (0, 0.3, 0.55, 0.99):
        path.write_bytes(data[: int(part * len(data))])
        done = batch()
        assert done.code == 0
        assert written() == [
            r | {"n_cached": f["n_cached"]} for r, f in zip(whole, written(), strict=True)
        ]
    assert (
        "were there already" in done.err and "bytes of an interrupted request cut off" in done.err
    )
    done = batch()
    assert (done.code, done.out) == (0, b"")
    assert done.err == "requests   6 were there already, nothing is left to do\n"


@pytest.mark.slow
def test_nothing_to_do_is_quick(batch, written, monkeypatch):
    assert batch("--quiet", lines=asked(1)).err == ""
    monkeypatch.setattr("kvrt.cli.process.startup.check_device", lambda *_: 1 / 0)
    assert batch("--quiet").err == ""


@pytest.mark.slow
def test_requests_may_be_added(batch, written):
    assert batch(lines=asked(1)).code == 0
    done = batch(lines=asked(2))
    assert done.code == 0 and "1 done, 1 were there already" in done.err
    assert [r["id"] for r in written()] == ["r0", "r1"]


@pytest.mark.slow
def test_a_bad_line_that_was_mended_is_served(batch, written):
    assert batch(lines=[*asked(1), "nonsense\n"]).code == 1
    done = batch(lines=asked(2))
    assert done.code == 0 and "1 done" in done.err
    assert [(r["id"], "error" in r) for r in written()] == [("r0", False), ("r1", False)]


@pytest.mark.slow
def test_pipes(batch):
    text = "".join(json.dumps(line) + "\n" for line in asked(2))
    done = batch("--quiet", given="-", out="-", stdin=text.encode())
    assert (done.code, done.err) == (0, "")
    assert {json.loads(line)["id"] for line in done.out.splitlines()} == {"r0", "r1"}


@pytest.mark.slow
def test_flags_are_what_a_line_leaves_out(batch, written):
    lines = [{"id": "a", "prompt": TEXTS[0]}, {"id": "b", "prompt": TEXTS[0], "n_predict": 2}]
    assert batch("-n", 5, "--temp", 0, "--ignore_eos", lines=lines).code == 0
    a, b = written()
    assert (len(a["tokens"]), len(b["tokens"])) == (5, 2)
    assert a["tokens"][:2] == b["tokens"]


@pytest.mark.slow
def test_a_stop_text_ends_one_request_and_not_the_other(batch, written):
    lines = [{"id": x, "prompt": TEXTS[0], "n_predict": 12, "temp": 0} for x in "ab"]
    assert batch(lines=lines).code == 0
    text = written()[0]["text"]
    stop = text[3:5]
    stops = [lines[0] | {"id": "c", "stop": stop}, lines[1]]
    done = batch("--stats", lines=stops, out="stop.jsonl")
    assert done.code == 0 and "cancelled" not in done.err
    ended = [line.split() for line in done.err.splitlines() if line.startswith("ended: ")]
    assert ended == [["ended:", "stop", "1"], ["ended:", "length", "1"]]
    b, c = written("stop.jsonl")
    assert (b["text"], c["text"]) == (text, text[: text.index(stop)])
    assert (b["finish_reason"], c["finish_reason"]) == ("length", "stop_string")


@pytest.mark.slow
def test_lower_priorities_go_first(batch, tmp_path):
    lines = [{"id": f"p{p}", "prompt": "a", "n_predict": 2, "priority": p} for p in (3, -1, 0)]
    assert batch("--n_seq_max", 1, lines=lines).code == 0
    found = [json.loads(x)["id"] for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == ["p-1", "p0", "p3"]


def test_a_file_of_other_requests_stays(batch, tmp_path):
    other = '{"id": "z", "tokens": [], "text": "", "finish_reason": "stop", "n_cached": 0}\n'
    (tmp_path / "out.jsonl").write_text(other)
    fails(batch(lines=asked(1)), 2, "out.jsonl: holds 1 result of requests that -i has not", '"z"')
    assert (tmp_path / "out.jsonl").read_text() == other


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--n_predict", 0), "n_predict"),
        (("--n_batch", 3), "--n_batch 3 is below --n_seq_max 4"),
        (("-c", 0), "n_ctx"),
        (("--metrics",), "Missing value"),
        (("--mode", "x"), "cell or paged"),
        (("--temp", "nan"), "temp"),
        (("more",), "unexpected argument 'more'"),
        (("--host_cache", "much"), "--host_cache much: a size is wanted"),
        (("--disk_cache", "x"), "add --host_cache SIZE"),
    ],
)
def test_mistakes(batch, tmp_path, flags, found):
    fails(batch(*flags, lines=asked(1)), 2, found)
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_are_wanted(batch, kvrt, tmp_path):
    fails(kvrt("batch", "-o", "x"), 2, "-i, --input FILE is wanted")
    fails(kvrt("batch", "-i", "x"), 2, "-o, --output FILE is wanted")
    fails(batch(lines=["nonsense\n"]), 2, "holds no request: line 1: no JSON")
    fails(batch(lines=asked(1), out="in.jsonl"), 2, "-i ", " name one file")
    fails(batch(given="none.jsonl"), 2, "none.jsonl: no such file or directory")
    done = batch("--metrics", tmp_path / "none" / "m", lines=asked(1))
    fails(done, 2, "--metrics", "there is no folder")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_cache_that_is_too_large(batch):
    fails(batch("-c", 2**31 - 1, lines=asked(1)), 2, "tokens in blocks needs", "lower -c")

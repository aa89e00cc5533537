"""`kvrt run --draft`: the same text, a summary of what became of drafts, and refusals."""

import dataclasses
import json

import pytest
from conftest import tiny_gguf
from test_report import OUTCOME, STATS

from kvrt.cli.report import summary


def json_of(done) -> dict:
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


@pytest.mark.slow
def test_drafts_change_no_text(go):
    asked = ("--json", "-n", 40, "--ignore_eos", "--dtype", "f32", "--temp", 0)
    plain = json_of(go(*asked))
    drafted = json_of(go(*asked, "--draft", "ngram", "--n_draft", 4))
    assert drafted["tokens"] == plain["tokens"]
    assert "n_rounds" not in plain
    assert drafted["n_rounds"] > 0 and drafted["n_accepted"] <= drafted["n_drafted"]


def test_the_summary_says_what_became_of_drafts():
    stats = dataclasses.replace(STATS, n_rounds=4, n_drafted=1200, n_accepted=10)
    outcome = dataclasses.replace(OUTCOME, stats=stats, dtype="f32")
    line = "drafts     1,200 in 4 rounds, 10 accepted, 3.5 tokens a round"
    assert line in summary.summary(outcome)
    found = summary.summary(dataclasses.replace(outcome, dtype="int8"))
    assert f"{line}; at int8 weights the text may differ from that without" in found
    assert not any(x.startswith("drafts") for x in summary.summary(OUTCOME))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--n_draft", 3), "--n_draft 3 drafts nothing alone; add --draft ngram"),
        (
            ("--draft", "ngram", "--n_ubatch", 8),
            "n_draft is 8, and a step of 9 tokens exceeds n_ubatch 8",
        ),
        (
            ("--draft", "ngram", "--n_draft", 4, "--cache_type_k", "kivi4", "--block_size", 32),
            "keys of kivi4 share scales",
        ),
        (
            ("--draft", "ngram", "--session", "a.kv", "--session_all"),
            "--draft ngram runs ahead of what is shown, and a session of the answer must not",
        ),
    ],
    ids=["alone", "n_ubatch", "kivi", "session"],
)
def test_what_does_not_fit_is_one_line(go, flags, message):
    done = go(*flags)
    assert done.code == 2 and done.out == b"" and done.err.count("\n") == 1
    assert message in done.err


@pytest.mark.slow
def test_the_first_layers_draft(go, tmp_path):
    deeper = tiny_gguf.write_gguf(tmp_path / "deeper.gguf", tiny_gguf.TinyModel(n_layers=2))
    asked = ("--json", "-n", 24, "--ignore_eos", "--dtype", "f32", "--temp", 0.7, "-m", deeper)
    plain = json_of(go(*asked))
    drafted = json_of(go(*asked, "--draft", "layerskip:1", "--n_draft", 3))
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["n_rounds"] > 0 and 0 < drafted["n_accepted"] <= drafted["n_drafted"]


@pytest.mark.parametrize(
    ("exit_layer", "message"),
    [
        ("0", "exit_layer is 0; at least the model's first layer drafts"),
        ("99", "exit_layer is 99, and the model has 1 layers; some of them must draft"),
        ("two", "--draft layerskip:two: 'two' is no number of layers"),
    ],
)
def test_layers_that_the_model_lacks_are_one_line(go, exit_layer, message):
    done = go("--draft", f"layerskip:{exit_layer}", "--n_draft", 4)
    assert done.code == 2 and done.out == b"" and done.err.count("\n") == 1
    assert message in done.err


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model of the same vocabulary."""
    path = tmp_path_factory.mktemp("other") / "smaller.gguf"
    return tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(n_layers=1, seed=5))


@pytest.mark.slow
def test_a_smaller_model_drafts(go, tiny, other):
    asked = ("--json", "-n", 24, "--ignore_eos", "--dtype", "f32", "--temp", 0.7, "--seed", 3)
    plain = json_of(go(*asked))
    for drafter in (other, tiny):
        drafted = json_of(go(*asked, "--draft", drafter, "--n_draft", 4))
        assert drafted["tokens"] == plain["tokens"]
        assert drafted["n_rounds"] > 0
    # The model itself samples what it samples, with the same random numbers.
    assert drafted["n_accepted"] == drafted["n_drafted"] > 12


@pytest.mark.slow
def test_a_smaller_model_drafts_for_a_batch(kvrt, tiny, other, tmp_path):
    asked, texts = tmp_path / "in.jsonl", []
    lines = [{"id": x, "prompt": "the sand of the", "n_predict": 20, "seed": i} for i, x in
             enumerate("abc")]  # fmt: skip
    asked.write_text("".join(json.dumps(x | {"temp": 0.7}) + "\n" for x in lines))
    for i, drafter in enumerate((None, other, tiny)):
        drafts = ["--draft", drafter, "--n_draft", 4, "--metrics", tmp_path / "counts"]
        flags = drafts if drafter else []
        fixed = ["batch", "-m", tiny, "-i", asked, "-o", tmp_path / f"{i}", "-c", 256, "-b", 8]
        done = kvrt(*fixed, "--n_seq_max", 2, "--ignore_eos", "--dtype", "f32", *flags)
        assert done.code == 0, done.err
        found = map(json.loads, (tmp_path / f"{i}").read_text().splitlines())
        texts.append({x["id"]: x["tokens"] for x in found})
    assert texts[0] == texts[1] == texts[2]
    counted = (tmp_path / "counts").read_text().splitlines()
    drafts = {k: float(next(x for x in counted if f'drafts_total{{kind="{k}"' in x).split()[-1])
              for k in ("drafted", "accepted")}  # fmt: skip
    assert drafts["accepted"] == drafts["drafted"] > 12


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "batch"])
def test_a_drafter_of_another_vocabulary_is_one_line(
    kvrt, go, tiny, tmp_path, monkeypatch, command
):
    words = tiny_gguf.vocabulary()
    a, b = words.index("Q"), words.index("Z")
    words[a], words[b] = words[b], words[a]
    monkeypatch.setattr(tiny_gguf, "vocabulary", lambda: words)
    path = tiny_gguf.write_gguf(tmp_path / "other.gguf", tiny_gguf.TinyModel(n_layers=1))
    asked = tmp_path / "in.jsonl"
    asked.write_text(json.dumps({"id": "a", "prompt": "the sand"}) + "\n")
    batch = ["batch", "-m", tiny, "-i", asked, "-o", tmp_path / "out", "--draft", path]
    done = go("--draft", path) if command == "run" else kvrt(*batch)
    assert done.code == 2 and done.out == b"" and done.err.count("\n") == 1
    assert "its vocabulary is another than that of" in done.err
    assert go("--draft", tmp_path / "none.gguf").code == 2


@pytest.mark.slow
def test_a_batch_with_drafts_gives_the_same_and_resumes_as_without(kvrt, tiny, tmp_path):
    asked = tmp_path / "in.jsonl"
    line = {"prompt": "the sand of the sand of the sand", "n_predict": 40, "temp": 0, "stop": []}
    asked.write_text("".join(json.dumps({"id": x} | line) + "\n" for x in "ab"))

    def run(out, *flags):
        fixed = ["batch", "-m", tiny, "-i", asked, "-o", tmp_path / out, "-c", 256, "-b", 8]
        done = kvrt(*fixed, "--n_seq_max", 2, "--block_size", 8, "--ignore_eos", *flags)
        assert done.code == 0, done.err
        lines = map(json.loads, (tmp_path / out).read_text().splitlines())
        return {x["id"]: x for x in lines}

    plain = run("plain")
    drafts = ("--draft", "ngram", "--n_draft", 4)
    drafted = run("drafted", *drafts, "--metrics", tmp_path / "counts")
    assert {k: x["tokens"] for k, x in drafted.items()} == {
        k: x["tokens"] for k, x in plain.items()
    }
    counted = (tmp_path / "counts").read_text()
    assert 'kvrt_drafts_total{kind="rounds"}' in counted
    assert 'kvrt_drafts_total{kind="rounds"} 0' not in counted
    assert run("plain", *drafts) == plain  # nothing is computed again


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--n_draft", 3), "--n_draft 3 drafts nothing alone; add --draft ngram"),
        (("--draft", "ngram", "--n_batch", 16, "--n_draft", 16), "17 tokens exceeds n_batch 16"),
        (("--draft", "other.gguf"), "other.gguf"),
        (("--draft", "layerskip:9"), "exit_layer is 9, and the model has"),
    ],
    ids=["alone", "n_batch", "model", "layers"],
)
def test_a_batch_refuses_drafts_that_do_not_fit(kvrt, tiny, tmp_path, flags, message):
    asked = tmp_path / "in.jsonl"
    asked.write_text('{"id": "a", "prompt": "a"}\n')
    done = kvrt("batch", "-m", tiny, "-i", asked, "-o", tmp_path / "out", *flags)
    assert done.code == 2 and message in done.err

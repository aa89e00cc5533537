"""`kvrt batch` on a file that has results already: which stand, which are refused or done anew."""

import dataclasses
import json
import os
import shutil

import pytest
from conftest import tiny_gguf

from kvrt.cli.batch.digest import Basis, Digests
from kvrt.cli.batch.requests import Requests
from kvrt.cli.batch.results import Expected, Result, Results, failed
from kvrt.cli.flags.serving import BatchOptions
from kvrt.errors import UsageError
from kvrt_models.file_digest import depends_on_n_ctx, model_digest

LINES = (
    {"id": "a", "prompt": "Once"},
    {"id": "b", "prompt": "Twice", "temp": 0.5, "n": 2},
    {"id": "c", "tokens": [1, 2], "n_predict": 7, "seed": 3},
    {"id": "long", "prompt": "Once upon"},
)


class Batch:
    """Results without an engine: each says what it was computed from."""

    def __init__(self, folder, model):
        self.given, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self.former = folder / "out.jsonl~"
        self.options = BatchOptions(model=str(model), temp=0.8)

    def run(self, lines=LINES, *, fails=(), n_most=99, **flags):
        """Computes what is left; ids that were, and what was said."""
        self.given.write_text("".join(_text(x) for x in lines))
        options, told = dataclasses.replace(self.options, **flags), []
        requests = Requests(str(self.given), options, Digests(options).of)
        expected = Expected(
            digests={e.id: e.digest for e in requests.entries},
            bad={x.line: x.error for x in requests.bad},
            restart=options.restart,
            tell=told.append,
        )
        n = {e.id: e.n for e in requests.entries}
        try:
            results = Results(str(self.out), n, expected)
        except BaseException:
            requests.close()
            raise
        for bad in requests.bad:
            if bad.line not in results.reported:
                results.write([failed(bad.id, bad.error, line=bad.line)])
        todo = [e for e in requests.entries if e.id not in results.done][:n_most]
        for e in todo:
            text = f"{requests.read(e).prompt} {options.temp} {options.model[-5:]}"
            several = [i if e.n > 1 else None for i in range(e.n)]
            results.write(
                [failed(e.id, "too long")]
                if e.id in fails
                else [
                    Result(
                        id=e.id,
                        sample=i,
                        tokens=[1],
                        text=text,
                        finish_reason="stop",
                        n_cached=0,
                    )
                    for i in several
                ]
            )
        results.close()
        requests.close()
        return [e.id for e in todo], told

    def held(self):
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def refuses(self, *words, lines=LINES, **flags):
        before = self.out.read_bytes()
        with pytest.raises(UsageError) as caught:
            self.run(lines, **flags)
        assert all(word in str(caught.value) for word in words), caught.value
        assert self.out.read_bytes() == before and not self.former.exists()
        assert "--restart" in str(caught.value) and "\n" not in str(caught.value)


def _text(line):
    return line if isinstance(line, str) else json.dumps(line) + "\n"


def edited(i, **changes):
    return [x | changes if j == i else x for j, x in enumerate(LINES)]


@pytest.fixture
def batch(tmp_path, tiny):
    return Batch(tmp_path, tiny)


def test_the_same_command_goes_on_and_nothing_is_done_twice(batch):
    assert batch.run(n_most=2) == (["a", "b"], [])
    assert batch.run() == (["c", "long"], [])
    whole = batch.out.read_bytes()
    assert batch.run() == ([], []) and batch.out.read_bytes() == whole
    assert not batch.former.exists()
    # Flags that decide how fast, how many at once and how it is told; an order, and spaces.
    same = {"n_seq_max": 2, "n_batch": 64, "mode": "cell", "quiet": True, "host_cache": "1GB"}
    assert batch.run(LINES[::-1], **same, n_ctx=999) == ([], [])
    assert batch.run(edited(0, priority=5)) == ([], [])
    assert batch.run(['{"temp":0.5,  "n": 2, "prompt":"Twice", "id":"b"}\n', *LINES[2:], LINES[0]])


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "Never"},
        {"temp": 0.9},
        {"seed": 9},
        {"n": 3},
        {"stop": "x"},
        {"n_predict": 9},
        {"ignore_eos": True},
    ],
)
def test_a_changed_request_is_computed_anew_and_nothing_else(batch, change):
    batch.run()
    before = batch.out.read_bytes()
    todo, told = batch.run(edited(1, **change))
    assert todo == ["b"]
    what = '1 result of requests that were changed ("b")'
    rest = f"what -i asks for is computed anew, the former file is {batch.former}"
    assert told == [f"{batch.out}: taken out: {what}; {rest}"]
    assert batch.former.read_bytes() == before
    assert os.stat(batch.former).st_mode & 0o777 == os.stat(batch.out).st_mode & 0o777 == 0o600
    found = batch.held()
    assert [r["id"] for r in found] == ["a", "c", "long", *["b"] * change.get("n", 2)]
    assert batch.run(edited(1, **change)) == ([], [])


def test_other_flags_are_refused_where_they_matter(batch):
    batch.run()
    batch.refuses('3 results made with other flags ("a", "c", "long")', temp=0.1)
    batch.refuses("4 results made with other flags", cache_type_k="bf16")
    batch.refuses("4 results made with other flags", dtype="bf16")
    batch.refuses("4 results made with other flags", rope="read")
    # Those that say it themselves have nothing to do with the flag.
    todo, told = batch.run(temp=0.1, restart=True)
    assert todo == ["a", "c", "long"] and "3 results made with other flags" in told[0]
    assert {r["text"].split()[-2] for r in batch.held() if r["id"] != "b"} == {"0.1"}
    assert batch.run(temp=0.1) == ([], [])


def test_another_model_is_refused_by_its_bytes_and_not_by_its_name(batch, tmp_path):
    batch.run()
    copy, other = tmp_path / "copy.gguf", tmp_path / "other.gguf"
    shutil.copy(batch.options.model, copy)
    assert batch.run(model=str(copy)) == ([], [])
    tiny_gguf.write_gguf(other, tiny_gguf.TinyModel(n_layers=1, seed=3))
    batch.refuses("4 results of another model", model=str(other))
    # In the same place as well.
    shutil.copy(other, copy)
    batch.refuses("4 results of another model", model=str(copy))
    assert batch.run(model=str(other), restart=True)[0] == ["a", "b", "c", "long"]
    assert len(batch.held()) == 5


def test_results_of_requests_that_are_gone_are_refused_or_dropped(batch):
    batch.run()
    batch.refuses('2 results of requests that -i has not ("a", "b")', lines=LINES[2:])
    assert batch.run(LINES[2:], restart=True)[0] == []
    assert [r["id"] for r in batch.held()] == ["c", "long"] and batch.former.exists()


def test_files_of_older_versions_are_refused_or_computed_anew(batch):
    batch.run()
    old = [{k: x for k, x in r.items() if k != "digest"} for r in batch.held()]
    batch.out.write_text("".join(map(_text, old)))
    batch.refuses("4 results without digests, as older versions wrote them")
    assert batch.run(restart=True)[0] == ["a", "b", "c", "long"]
    batch.former.unlink()
    broken = [r | {"digest": "nonsense"} for r in batch.held()]
    batch.out.write_text("".join(map(_text, broken)))
    batch.refuses("4 results without digests")


def test_an_error_under_other_limits_is_tried_again(batch):
    batch.run(fails=["long"])
    assert batch.run() == ([], [])
    todo, told = batch.run(n_ctx=1 << 14)
    assert todo == ["long"] and "1 result of requests that failed under other limits" in told[0]


def test_each_edit_keeps_the_results_before_it(batch):
    batch.run()
    kept = [batch.out.read_bytes()]
    for i in range(2):
        batch.run(edited(1, prompt=f"Never {i}"))
        kept.append(batch.out.read_bytes())
    backups = [batch.out.with_name(f"out.jsonl~{n}") for n in ("", 2)]
    assert [p.read_bytes() for p in backups] == kept[:2]
    _, told = batch.run(temp=0.7, restart=True)
    assert told[0].endswith("the former file is " + f"{batch.out}~3")
    assert [p.read_bytes() for p in backups] == kept[:2]


def test_a_line_that_was_mended_is_no_error_any_more(batch):
    lines = [LINES[0], "nonsense\n", LINES[2], {"id": "a", "prompt": "again"}]
    batch.run(lines)
    assert [r.get("line") for r in batch.held() if "error" in r] == [2, 4]
    assert batch.run(lines) == ([], [])
    lines[1] = LINES[1]
    todo, told = batch.run(lines)
    assert todo == ["b"] and "1 result of lines that were no requests (2)" in told[0]
    assert [r.get("line") for r in batch.held() if "error" in r] == [4]


def test_what_was_torn_is_cut_off_beside_what_is_computed_anew(batch):
    batch.run()
    whole = batch.out.read_bytes()
    batch.out.write_bytes(whole[:-9])
    todo, _ = batch.run(edited(0, prompt="Never"))
    assert todo == ["a", "long"] and batch.former.read_bytes() == whole[:-9]
    # A sample of two that is there alone was torn as well.
    batch.out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert batch.run()[0] == ["b", "c", "long"]


def test_what_is_no_result_stays_as_it_is(batch):
    batch.out.write_text("my diary\n")
    with pytest.raises(UsageError, match="line 1 is not of these requests"):
        batch.run(restart=True)
    assert batch.out.read_text() == "my diary\n"


def test_a_digest_says_what_it_is_of(tiny, tmp_path):
    basis = Basis("m", "f", "r", "l", "x")
    assert Basis.parse(str(basis)) == basis
    assert Basis.parse("a.b") is Basis.parse(7) is None
    known = model_digest("smollm2-135m")
    assert known.startswith("b179c952")  # pinned: nothing is fetched for it
    folder = tiny_gguf.write_folder(tmp_path / "model", tiny_gguf.TinyModel(n_layers=1))
    before = model_digest(str(folder))
    (folder / "README.md").write_text("words")
    assert model_digest(str(folder)) == before != known
    assert not depends_on_n_ctx(str(folder)) and not depends_on_n_ctx(str(tiny))
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert depends_on_n_ctx(str(folder)) and model_digest(str(folder)) != before
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        model_digest("no-such-model")


@pytest.mark.slow
def test_the_command_refuses_goes_on_and_restarts(kvrt, tiny, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": x, "prompt": "the sand", "n_predict": 3} for x in "ab"]
    given.write_text("".join(map(_text, lines)))
    words = ["batch", "-m", tiny, "-i", given, "-o", out, "-c", 256, "--n_batch", 16]
    words += ["--n_seq_max", 4, "--block_size", 8, "--temp", 0]
    assert kvrt(*words).code == 0
    first = out.read_text()
    done = kvrt(*words)
    assert done.code == 0 and "nothing is left to do" in done.err
    for other in (["--cache_type_v", "bf16"], ["--temp", 0.7]):
        done = kvrt(*words, *other)
        assert (done.code, done.out) == (2, b"") and done.err.count("\n") == 1
        assert 'holds 2 results made with other flags ("a", "b")' in done.err
        assert "--restart" in done.err and out.read_text() == first
    lines[1] |= {"prompt": "the otter"}
    given.write_text("".join(map(_text, lines)))
    done = kvrt(*words)
    assert done.code == 0 and 'of requests that were changed ("b")' in done.err
    found = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert found["a"] == json.loads(first.splitlines()[0]) and len(found) == 2
    done = kvrt(*words, "--cache_type_v", "bf16", "--restart", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert {r["digest"][:10] for r in found.values()} == {model_digest(str(tiny))[:10]}

"""`kvrt run --session`, `prefill` and `ask`: the same text as without, less work, files kept."""

import json
import os

import pytest
from conftest import BOOK, PROMPT, tiny_gguf

from kvrt import session
from kvrt.cellcache.history import tokens


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model of the same shape."""
    path = tmp_path_factory.mktemp("other") / "tiny.gguf"
    return tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(n_layers=1, seed=3))


def ids_of(path):
    return tokens(session.read(path).history, 0).tolist()


def told(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.slow
def test_a_second_run_is_restored_and_writes_the_same(go, tmp_path):
    path = tmp_path / "a.kv"
    plain = go("--quiet")
    first = go("--session", path)
    assert "a.kv: nothing restored, 3 computed: no such session yet" in first.err
    kept = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    second = go("--session", path)
    assert plain.out == first.out == second.out
    line = second.err.splitlines()[0]
    assert line.startswith(f"{path}: 2 tokens restored in ")
    assert line.endswith(" s, 1 recomputed: 1 the last token, always recomputed")
    assert path.read_bytes() == kept


@pytest.mark.slow
def test_a_longer_prompt_goes_on_from_a_session(go, book, prefilled):
    before = told(go("-f", book, "--json", "--quiet", "--session", prefilled, prompt=False))
    assert before["n_recomputed"] == 1
    asked = ["-f", book, "-p", "of the", "--json"]
    done = go(*asked, "--session", prefilled, prompt=False)
    found = told(done)
    assert found["n_restored"] == before["n_prompt"] and "not in the session" in done.err
    both = book.with_name("both.txt")
    both.write_text(f"{BOOK}\n\nof the")
    plain = told(go("-f", both, "--json", prompt=False))
    assert plain["text"] == found["text"] and plain["tokens"] == found["tokens"]
    # The session is now the longer prompt.
    again = told(go(*asked, "--session", prefilled, "--quiet", prompt=False))
    assert again["n_recomputed"] == 1 and again["text"] == plain["text"]


@pytest.mark.slow
def test_all_keeps_what_was_written(go, tmp_path):
    path = tmp_path / "a.kv"
    first = told(go("--json", "--quiet", "--session", path, "--session_all", "-n", 8))
    assert session.read_manifest(path).draws[0].n_drawn == 8
    longer = PROMPT + first["text"]
    second = told(go("--json", "--quiet", "--session", path, "-p", longer, prompt=False))
    assert second["n_restored"] > 3
    assert session.read_manifest(path).draws == {}


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--temp", 0], ["--temp", 1.5, "--seed", 7, "--top_k", 0]])
def test_a_session_goes_on_where_it_was_left(go, tmp_path, more):
    path = tmp_path / "a.kv"
    words = [*more, "--json", "--quiet", "--ignore_eos"]
    whole = told(go(*words, "-n", 20))["tokens"]
    keep = ["--session", path, "--session_all", "--json", "--quiet", "--ignore_eos"]
    first = told(go(*words, *keep, "-n", 9))["tokens"]
    # `go` gives --temp 0, which counts as given; the rest comes with the session.
    second = told(go(*keep, *more[:2], "-n", 6, prompt=False))
    third = told(go(*keep, *more[:2], "-n", 5, prompt=False))
    assert [*first, *second["tokens"], *third["tokens"]] == whole
    assert second["n_recomputed"] == 0 and third["n_restored"] == 3 + 15


def test_nothing_to_go_on_with(go, tmp_path):
    done = go("--session", tmp_path / "a.kv", prompt=False)
    assert (done.code, done.out) == (2, b"") and "give a prompt" in done.err
    done = go("--session", tmp_path, prompt=False)
    assert done.code == 2 and "which of its sessions" in done.err


@pytest.mark.slow
def test_a_prefilled_session_goes_on(go, book, prefilled):
    plain = told(go("-f", book, "--json", prompt=False))
    found = told(go("--session", prefilled, "--json", "--quiet", prompt=False))
    assert found["tokens"] == plain["tokens"]


@pytest.mark.slow
def test_read_only_writes_nothing(go, tmp_path, prefilled):
    path = tmp_path / "none.kv"
    assert go("--quiet", "--session", path, "--session_ro").code == 0
    assert not path.exists()
    kept, when = prefilled.read_bytes(), prefilled.stat().st_mtime_ns
    assert go("--quiet", "--prompt-cache", prefilled, "--prompt-cache-ro").code == 0
    assert (prefilled.read_bytes(), prefilled.stat().st_mtime_ns) == (kept, when)


def refused(done, path, code, *parts):
    before, wrong = path
    assert done.code == code and done.out == b"", done.err
    assert done.err.count("\n") == 1 and done.err.startswith("kvrt: ")
    for part in (str(wrong), *parts):
        assert part in done.err, done.err
    assert wrong.read_bytes() == before


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_stays(go, prefilled, other):
    kept = prefilled.read_bytes(), prefilled
    refused(
        go("--session", prefilled, "-m", other),
        kept,
        2,
        "model.weights is ",
        " here",
    )
    refused(
        go("--session", prefilled, "--cache_type_k", "f32"), kept, 2, "type_k is f16", "f32 here"
    )
    refused(go("--session", prefilled, "--rope", "read"), kept, 2, "rope is write")
    refused(go("--session", prefilled, "-c", 8), kept, 1, "raise ")


def test_what_is_damaged_is_refused_and_stays(go, prefilled, tmp_path):
    data = bytearray(prefilled.read_bytes())
    data[5000] ^= 1
    prefilled.write_bytes(data)
    refused(go("--session", prefilled), (bytes(data), prefilled), 1, "xxh3-128", "damaged")
    text = tmp_path / "notes.txt"
    text.write_text("no session at all")
    refused(go("--session", text), (b"no session at all", text), 2, "is not a session")


@pytest.mark.slow
def test_a_session_brings_its_settings(go, tmp_path):
    path = tmp_path / "a.kv"
    words = ["--rope", "read", "--cache_type_k", "f16", "--cache_type_v", "bf16"]
    first = go("--quiet", "--session", path, *words)
    second = go("--quiet", "--session", path, "--json")
    assert json.loads(second.out)["text"] == first.out.decode()
    assert json.loads(second.out)["n_restored"] == 2


@pytest.mark.slow
def test_a_session_remembers_what_a_shift_keeps(kvrt, go, tiny, tmp_path):
    path, shown = tmp_path / "talk.kv", {}
    small = ["-c", 32, "--session_all", "--ignore_eos"]
    begins = ["-p", BOOK[:24], "--session", path, *small]
    assert go(*begins, "--keep", 4, "-n", 8, prompt=False).code == 0
    first, kept = ids_of(path), path.read_bytes()

    def goes_on(*flags):
        path.write_bytes(kept)
        done = go("--session", path, *small, "-n", 20, *flags, prompt=False)
        assert done.code == 0, done.err
        shown.update(json.loads(kvrt("inspect", path, "--json").out)["sequences"][0])
        return ids_of(path)[:4] == first[:4], done.err

    stays, said = goes_on()
    assert stays and f"{path}: --keep 4, as the session was left" in said
    assert shown["policy"] == "name=ContextShift n_keep=4"
    stays, said = goes_on("--keep", 0)
    assert not stays and "as the session was left" not in said
    # A run that shifts nothing forgets nothing.
    path.write_bytes(kept)
    assert go("--session", path, *small, "-n", -2, prompt=False).code == 0
    assert session.read_manifest(path).policies[0]["n_keep"] == 4
    # A question drops text as the session does, and says so.
    path.write_bytes(kept)
    done = kvrt("ask", path, "who?", "-m", tiny, "-n", 1)
    assert done.code == 0 and "--keep 4, as the session was left" in done.err
    sinks = ["--policy", "attention_sinks", "--n_sink", 2, "--n_window", 20]
    path.unlink()
    assert go(*begins, *sinks, "-n", 8, prompt=False).code == 0
    kept = path.read_bytes()
    stays, said = goes_on()
    assert "--policy attention_sinks --n_sink 2 --n_window 20, as the session was left" in said
    assert len(ids_of(path)) <= 22 and "AttentionSinks" in shown["policy"]
    # The command says otherwise.
    _, said = goes_on("--context_shift")
    assert "as the session was left" not in said and "ContextShift" in shown["policy"]


def test_a_folder_that_is_not_there(go, tmp_path):
    done = go("--session", tmp_path / "none" / "a.kv")
    assert done.code == 2 and "there is no folder" in done.err and done.err.count("\n") == 1


def test_a_folder_that_cannot_be_written(go, tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *more):
        if flags & os.O_CREAT and str(tmp_path) in str(path):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    done = go("--session", tmp_path / "a.kv")
    assert done.code == 1 and "no file can be made in" in done.err and done.out == b""


@pytest.mark.slow
def test_a_folder_keeps_many_and_finds_the_best(go, book, tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    keep = ["--session", folder, "--json", "--quiet"]
    assert told(go(*keep))["n_restored"] == 0
    long = told(go("-f", book, *keep, prompt=False))
    assert long["n_recomputed"] < long["n_prompt"]
    assert len(list(folder.glob("*.kv"))) == 2
    plain = told(go("-f", book, "--json", prompt=False))
    again = told(go("-f", book, *keep, prompt=False))
    assert again["n_recomputed"] == 1 and again["text"] == plain["text"] == long["text"]
    assert len(list(folder.glob("*.kv"))) == 2


@pytest.mark.slow
def test_chunks_are_taken_over_when_asked(go, tmp_path):
    ids = [i % 250 for i in range(100)]
    changed = [*ids[:10], 251, 252, *ids[12:]]
    one, two = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text(json.dumps(ids))
    two.write_text(json.dumps(changed))
    path = tmp_path / "a.kv"
    words = ["-c", 128, "--session", path, "--json", "-n", 2]
    go("--tokens", one, *words, prompt=False)
    off = go("--tokens", two, *words, "--session_ro", prompt=False)
    on = go("--tokens", two, *words, "--reuse_chunks", prompt=False)
    assert told(off)["n_recomputed"] == 90 and "(see --reuse_chunks)" in off.err
    assert told(on)["n_recomputed"] == 3 and "approximate from token 12 on" in on.err
    assert told(on)["approximations"] == [{"by": "reuse_chunks", "from_token": 12}]
    assert told(off)["approximations"] == []
    for n in (88, 1):
        # The exact rows take the place of the others.
        assert told(go("--tokens", two, *words, prompt=False))["n_recomputed"] == n


@pytest.mark.slow
def test_ask_leaves_the_session_as_it_is(kvrt, go, tiny, book, prefilled):
    kept = prefilled.read_bytes()
    done = kvrt("ask", prefilled, "-m", tiny, "-n", 8, "--temp", 0, "of the")
    assert done.code == 0 and "tokens restored" in done.err
    assert prefilled.read_bytes() == kept
    both = ["-f", book, "-p", "of the", "--session", prefilled, "--session_ro"]
    assert done.out == go(*both, "-n", 8, prompt=False).out + b"\n"


@pytest.mark.slow
def test_many_questions_are_each_the_first(kvrt, go, tiny, book, prefilled, tmp_path):
    ask = ["ask", prefilled, "-m", tiny, "-n", 8, "--temp", 0]
    both = book.with_name("both.txt")
    plain = []
    for question in ("of the", "and"):
        both.write_text(f"{BOOK}\n\n{question}")
        plain.append(go("-f", both, "-n", 8, "--quiet", prompt=False).out)
    questions = tmp_path / "q.txt"
    questions.write_text("of the\n\nand\n  of the \n")
    many = kvrt(*ask, "-F", questions, "--quiet")
    assert many.out == b"\n\n".join([plain[0], plain[1], plain[0]]) + b"\n" and many.err == ""
    shown = kvrt(*ask, "-F", questions).out
    both = [b"> " + q + b"\n" + a for q, a in zip([b"of the", b"and"], plain, strict=True)]
    assert shown == b"\n\n".join([*both, both[0]]) + b"\n"
    lines = kvrt(*ask, "-F", "-", "--json", "--quiet", stdin=b"and\nof the").out.splitlines()
    found = [json.loads(line) for line in lines]
    assert [x["question"] for x in found] == ["and", "of the"]
    assert [x["text"].encode() for x in found] == plain[::-1]


@pytest.mark.slow
def test_answers_that_shift_the_context_change_no_later_one(kvrt, tiny, prefilled):
    ask = ["ask", prefilled, "-m", tiny, "-n", 60, "--temp", 0, "--quiet", "--ignore_eos"]
    one = kvrt(*ask, "of the").out
    assert kvrt(*ask, "-F", "-", stdin=b"of the\nof the").out == one[:-1] + b"\n\n" + one
    assert kvrt(*ask, "-F", "-", stdin=b"\n \n").code == 2


@pytest.mark.slow
def test_a_read_session_is_read_on(kvrt, tiny, book, prefilled):
    book.write_text(f"{BOOK} and more of it")
    done = kvrt("prefill", "-m", tiny, "-f", book, "-o", prefilled)
    assert done.code == 0 and "restored" in done.err and "not in the session" in done.err
    kept = prefilled.read_bytes()
    done = kvrt("prefill", "-m", tiny, "-f", book, "-o", prefilled, "--quiet")
    assert (done.code, done.err) == (0, "") and prefilled.read_bytes() == kept

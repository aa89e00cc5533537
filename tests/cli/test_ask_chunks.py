"""`kvrt ask --chunk`: chunks from files, in any order, and what is refused."""

import json

import pytest
from conftest import tiny_gguf
from test_mistakes import fails

from kvrt import ChunkStore, session
from kvrt.errors import SaveError
from tests.marks import full

pytestmark = pytest.mark.slow  # of four layers more programs are compiled
TEXTS = {"a": "the sand of the sea and the rest of the land", "b": "in the mist on the water"}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model with layers behind the check layer."""
    path = tmp_path_factory.mktemp("deep") / "tiny.gguf"
    return tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(n_layers=4))


@pytest.fixture
def chunks(kvrt, deep, tmp_path, made):
    """Files of two chunks."""
    out = {}
    for name, text in TEXTS.items():
        path = tmp_path / f"{name}.kv"
        key = f"chunk {name}"
        if key not in made:
            words = ["-m", deep, "-c", 128, "-p", text, "--as_chunk", "-o", path]
            done = kvrt("prefill", *words)
            assert done.code == 0, done.err
            made[key] = path.read_bytes()
        path.write_bytes(made[key])
        out[name] = path
    return out


@pytest.fixture
def ask(kvrt, deep):
    def run(*words):
        return kvrt("ask", "-m", deep, "-c", 128, "-n", 6, "--temp", 0, *words)

    return run


def test_an_answer_behind_chunks(ask, chunks):
    named = ["--chunk", chunks["b"], "--chunk", chunks["a"]]
    before = [x.read_bytes() for x in chunks.values()]
    done = ask(*named, "of the", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    n = sum(session.read_manifest(x).n_tokens[0] for x in chunks.values()) - 1
    m = int(n * 0.15)
    assert found["n_reused"] == n - m and found["approximate"] and found["n_chunks"] == 2
    assert found["n_prompt"] == n + found["n_recomputed"] - m
    assert f"2 of {n} tokens in all: {n - m} reused, {m} recomputed behind layer 1" in done.err
    n_first = session.read_manifest(chunks["b"]).n_tokens[0]
    assert found["approximations"] == [{"by": "chunks", "from_token": n_first}]
    assert f"exactness  approximate from token {n_first} on: chunks were computed" in done.err
    again = json.loads(ask(*named, "of the", "--json").out)
    assert again["tokens"] == found["tokens"]
    assert before == [x.read_bytes() for x in chunks.values()]


def test_all_computed_again_is_the_answer_to_the_whole_text(ask, kvrt, deep, chunks, tmp_path):
    named = ["--chunk", chunks["a"], "--chunk", chunks["b"], "--ratio", 1]
    found = json.loads(ask(*named, "of the", "--json").out)
    ids = session.open_session(chunks["a"]).held[1].tolist()
    ids += session.open_session(chunks["b"]).held[1].tolist()[1:]
    whole, path = tmp_path / "whole.json", tmp_path / "whole.kv"
    whole.write_text(json.dumps(ids))
    assert kvrt("prefill", "-m", deep, "-c", 128, "--tokens", whole, "-o", path).code == 0
    plain = json.loads(kvrt("ask", path, "of the", "-m", deep, "-n", 6, "--temp", 0, "--json").out)
    assert plain["tokens"] == found["tokens"]
    assert not plain["approximate"] and not found["approximate"]


def test_each_question_starts_from_the_chunks(ask, chunks, tmp_path):
    named = ["--chunk", chunks["a"], "--chunk", chunks["a"], "--json"]
    one = json.loads(ask(*named, "why").out)
    file = tmp_path / "questions.txt"
    file.write_text("who is it\nwhy\n")
    several = [json.loads(x) for x in ask(*named, "-F", file).out.splitlines()]
    assert [x["question"] for x in several] == ["who is it", "why"]
    assert several[1]["tokens"] == one["tokens"]


def test_a_damaged_chunk_is_computed_again_or_refused(ask, chunks):
    whole = ask("--chunk", chunks["a"], "--chunk", chunks["b"], "why", "--quiet")
    blob = session.read_manifest(chunks["b"]).groups[0].blocks[0]
    data = bytearray(chunks["b"].read_bytes())
    data[blob.offset + 4] ^= 1
    chunks["b"].write_bytes(data)
    named = ["--chunk", chunks["a"], "--chunk", chunks["b"], "why", "--quiet"]
    done = ask(*named)
    assert done.code == 0 and done.out == whole.out
    assert "computed again from its tokens" in done.err and chunks["b"].read_bytes() == data
    fails(ask(*named, "--strict"), 1, "b.kv")


def test_texts_are_computed_once_and_kept(ask, chunks, tmp_path):
    wanted = ask("--chunk", chunks["b"], "--chunk", chunks["a"], "why", "--quiet").out
    files = [tmp_path / f"{name}.txt" for name in "ba"]
    for file in files:
        file.write_text(TEXTS[file.stem] + "\n")
    folder = tmp_path / "kept"
    named = ["--chunk", files[0], "--chunk", files[1], "why"]
    alone = ask(*named)
    assert alone.code == 0 and alone.out.rstrip() == wanted.rstrip()
    assert "2 of them computed alone first; --chunk_dir DIR would keep texts" in alone.err
    first = ask(*named, "--chunk_dir", folder)
    assert f"2 of them computed alone first; 2 now kept in {folder}" in first.err
    kept = sorted(folder.glob("*.kv"))
    assert len(kept) == 2
    # Another order, with another file's chunk between: found, whatever prompt it was computed for.
    more = ["--chunk", files[1], "--chunk", chunks["b"], "--chunk", files[0], "why", "--json"]
    found = json.loads(ask(*more, "--chunk_dir", folder).out)
    assert (found["n_chunks"], found["n_chunks_computed"]) == (3, 0)
    assert first.out == alone.out
    blob = session.read_manifest(kept[0]).groups[0].blocks[0]
    whole = kept[0].read_bytes()
    kept[0].write_bytes(bytes(b ^ (i == blob.offset + 4) for i, b in enumerate(whole)))
    fails(ask(*named, "--chunk_dir", folder, "--strict", "--quiet"), 1, kept[0].name)
    mended = ask(*named, "--chunk_dir", folder, "--quiet")
    assert mended.out.rstrip() == wanted.rstrip() and "and takes its place" in mended.err
    session.read(kept[0])


@pytest.mark.parametrize("kv_dtype", [full("int8"), full("q8_0"), "int4"])
def test_quantized_chunks(ask, kvrt, chunks, tmp_path, kv_dtype):
    types = ["--cache_type_k", kv_dtype, "--cache_type_v", kv_dtype]
    files = {name: tmp_path / f"{name}.txt" for name in TEXTS}
    for name, file in files.items():
        file.write_text(TEXTS[name])
    named = ["--chunk", files["b"], "--chunk", files["a"], "why", "--json", *types]
    folder = ["--chunk_dir", tmp_path / "kept"]
    first = ask(*named, *folder)
    assert first.code == 0, first.err
    wanted = json.loads(first.out)
    assert wanted["n_chunks_computed"] == 2 and wanted["n_reused"] > 0
    kept = sorted((tmp_path / "kept").glob("*.kv"))
    assert {str(session.read_manifest(x).fingerprint["type_k"]) for x in kept} == {kv_dtype}
    again = json.loads(ask(*named, *folder).out)
    assert again["tokens"] == wanted["tokens"] and again["n_chunks_computed"] == 0
    # Files of chunks serve as texts do, and name the KV dtype where no flag does.
    by_file = [x for path in kept for x in ("--chunk", path)]
    assert ask(*by_file, "why", "--quiet").code == 0
    # What was computed at float32 and is quantized afterwards is a chunk of this KV dtype.
    other = tmp_path / "other.kv"
    assert kvrt("convert", chunks["a"], "--to", kv_dtype, "-o", other).code == 0
    assert ask("--chunk", other, "--chunk", kept[0], "why", "--quiet").code == 0
    fails(ask("--chunk", chunks["a"], "--chunk", kept[0], "why"), 2, "type_k is")


def test_keys_by_channel_are_refused_with_the_reason(ask, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(TEXTS["a"])
    refused = ask("--chunk", file, "why", "--cache_type_k", "kivi4", "--cache_type_v", "f16")
    fails(refused, 2, "one scale for several tokens")


def test_loading_may_raise_the_ratio(ask, chunks, tmp_path):
    file = tmp_path / "questions.txt"
    file.write_text("who is it\nwhy\n")
    named = ["--chunk", chunks["a"], "--chunk", chunks["b"], "--auto_ratio", "-F", file, "--json"]
    done = ask(*named)
    assert done.code == 0, done.err
    first, second = map(json.loads, done.out.splitlines())
    assert first["load_s"] > 0 and first["prefill_s"] > 0
    hidden = min(1, first["load_s"] / first["prefill_s"])
    assert first["ratio"] == second["ratio"] == pytest.approx(max(0.15, hidden))
    assert "loading took" in done.err and "computing all would take" in done.err


def test_a_folder_that_is_full_costs_no_answer(ask, chunks, tmp_path, monkeypatch):
    wanted = ask("--chunk", chunks["a"], "why", "--quiet").out
    (tmp_path / "a.txt").write_text(TEXTS["a"])

    def full(store, here, chunk):
        raise SaveError(f"{store.folder}: no space left on device; make room")

    monkeypatch.setattr(ChunkStore, "add", full)
    done = ask("--chunk", tmp_path / "a.txt", "why", "--chunk_dir", tmp_path / "kept")
    assert (done.code, done.out.rstrip()) == (0, wanted.rstrip())
    assert "the answer goes on, and the text is not kept" in done.err
    assert f"0 now kept in {tmp_path / 'kept'}" in done.err


MISTAKES = {
    "ratio": (["--ratio", 1.5], "from 0 to 1"),
    "check layer": (["--check_layer", 99], "the model has 4, so at most 2"),
    "key frame": (["--rope", "read"], "a.kv: rope is write in the session and read here"),
    "KV dtype": (["--cache_type_k", "q8_0"], "a.kv: type_k is"),
    "sequence": (["--seq", 0], "--seq is for a session"),
    "self extend": (["-gan", 4, "-gaw", 16], "self_extend"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_a_line(ask, chunks, name):
    more, message = MISTAKES[name]
    fails(ask("--chunk", chunks["a"], "why", *more), 2, message)


def test_other_files_are_a_line(ask, kvrt, deep, tiny, chunks, tmp_path):
    fails(ask("--chunk", tmp_path / "none.kv", "why"), 2, "none.kv")
    other = tmp_path / "a.bin"
    other.write_bytes(b"of\0the")
    fails(ask("--chunk", other, "why"), 1, "a.bin")
    empty = tmp_path / "a.txt"
    empty.write_text("\n")
    fails(ask("--chunk", empty, "why"), 2, "a.txt: the text is empty")
    fails(ask("--chunk", chunks["a"], "why", "-c", 16), 1, "chunks and question have", "raise -c")
    fails(kvrt("ask", "-m", tiny, "--chunk", chunks["a"], "why"), 2, "a.kv: ", "session and")
    plain = tmp_path / "plain.kv"
    kvrt("prefill", "-m", deep, "-c", 128, "-p", "of the", "-o", plain)
    fails(ask("--chunk", chunks["a"], "--chunk", plain, "why"), 2, "plain.kv: begins", "--as_chunk")


def test_flags_of_chunks_without_chunks(kvrt, chunks):
    for flag in (["--ratio", 0.2], ["--auto_ratio"]):
        fails(kvrt("ask", chunks["a"], "why", *flag), 2, "add --chunk FILE")
    fails(kvrt("ask", "--chunk", chunks["a"]), 2, "a question is wanted")
    fails(kvrt("ask", chunks["b"], "why", "--chunk", chunks["a"]), 2, "leave out")
    fails(kvrt("prefill", "-p", "a", "--as_chunk", "--chat", "-o", "x.kv"), 2, "leave out --chat")


@pytest.mark.parametrize("mode", ["paged", full("cell")])
def test_lines_of_a_batch_name_chunks(kvrt, ask, deep, chunks, tmp_path, mode):
    text = tmp_path / "b.txt"
    text.write_text(TEXTS["b"])
    named = [str(chunks["a"]), str(text)]
    lines = [
        {"id": "plain", "prompt": "of the"},
        {"id": "both", "chunks": named, "prompt": "of the"},
        {"id": "again", "chunks": named[::-1], "prompt": "of the"},
        {"id": "none", "chunks": [str(tmp_path / "c.txt")], "prompt": "of the"},
        {"id": "long", "chunks": [named[0]] * 9, "prompt": "of the"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    words = ["-m", deep, "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--temp", 0]
    words += ["-n", 6, "-c", 256, "--n_ctx_seq", 128, "--n_batch", 8, "--n_seq_max", 2]
    words += ["--mode", mode, "--chunk_dir", tmp_path / "kept", "--block_size", 2]
    done = kvrt("batch", *words)
    assert done.code == 1, done.err
    found = {x["id"]: x for x in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert "c.txt: no such file" in found["none"]["error"]
    assert "raise -c" in found["long"]["error"]
    assert "approximate" not in found["plain"] and found["plain"]["n_cached"] == 0
    for name, files in (("both", named), ("again", named[::-1])):
        asked = [x for file in files for x in ("--chunk", file)]
        alone = json.loads(ask(*asked, "of the", "--json").out)
        there = found[name]
        assert there["approximate"] and there["n_reused"] == alone["n_reused"] > 0
        assert there["tokens"] == alone["tokens"]
    assert "2 requests began with blended chunks" in done.err
    assert "computed alone first: 1, 1 now kept in" in done.err
    # A chunk that was changed makes its requests new ones.
    again = kvrt("batch", *words)
    assert "3 were there already" in again.err or "4 were there already" in again.err
    text.write_text(TEXTS["b"] + " and the land")
    changed = kvrt("batch", *words)
    assert changed.code == 1 and "taken out: 2 results of requests that were changed" in changed.err
    after = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert {x["id"] for x in after} == set(found)
    words[words.index("-o") + 1] = tmp_path / "more.jsonl"
    fails(kvrt("batch", *words, "--noprefix_cache"), 2, "leave out --noprefix_cache")

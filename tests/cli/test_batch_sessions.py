"""`kvrt batch --session_dir`: requests begin from the best session of a folder."""

import json
import os
import re

import pytest
from conftest import BOOK, tiny_gguf
from test_mistakes import fails

MORE = (" and the wind", " in the rain", "")


@pytest.fixture
def folder(go, tmp_path):
    """A folder with a session of the text, and one of another."""
    path = tmp_path / "sessions"
    path.mkdir()
    for text in (BOOK, "a mist on the land"):
        done = go("-p", text, "--session", path, "-n", 1, prompt=False)
        assert done.code == 0, done.err
    return path


@pytest.fixture
def batch(kvrt, tiny, tmp_path):
    lines = [{"id": f"r{i}", "prompt": BOOK + x, "n_predict": 5} for i, x in enumerate(MORE)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))

    def run(*args, out="out.jsonl"):
        given = ["-m", tiny, "-i", tmp_path / "in.jsonl", "-o", tmp_path / out, "--temp", 0]
        sizes = ["-c", 256, "--n_batch", 8, "--n_seq_max", 2, "--block_size", 8]
        done = kvrt("batch", *given, *sizes, *args)
        found = (tmp_path / out).read_text().splitlines() if done.code < 2 else []
        return done, {r["id"]: r for r in map(json.loads, found)}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_requests_begin_from_the_best_session(batch, folder, mode):
    before = {p.name: p.read_bytes() for p in folder.glob("*.kv")}
    done, found = batch("--session_dir", folder, "--mode", mode)
    assert done.code == 0, done.err
    said = re.search(r"sessions   (\d+) of (\d+) prompt tokens were loaded from", done.err)
    n_loaded = int(said[1])
    assert n_loaded == found["r0"]["n_cached"] > 0 and (mode == "cell" or n_loaded % 8 == 0)
    # Loaded once, a session is a prefix hit of all others; and results are those without it.
    assert {r["n_cached"] for r in found.values()} <= {n_loaded, n_loaded - 1}
    assert {p.name: p.read_bytes() for p in folder.glob("*.kv")} == before
    _, wanted = batch(out="without.jsonl")
    assert {k: r["tokens"] for k, r in found.items()} == {k: r["tokens"] for k, r in wanted.items()}
    again, _ = batch("--session_dir", folder)
    assert "3 were there already" in again.err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_prompts_that_end_otherwise_resume_at_a_checkpoint(kvrt, tmp_path, mode):
    """Every other layer sees 16 positions: a hit in cells ends at one, and results are the same."""
    path = tmp_path / "tiny.gguf"
    model = tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(arch="gemma2", n_layers=2))
    text = [i % 250 for i in range(200)]
    lines = [{"id": i, "tokens": [*text[: 200 - 37 * i], 3, 4], "n_predict": 4} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = []
    for n in (0, 8):
        out = tmp_path / f"{n}.jsonl"
        given = ["-m", model, "-i", tmp_path / "in.jsonl", "-o", out, "--temp", 0, "--mode", mode]
        sizes = ["-c", 512, "--n_batch", 8, "--n_seq_max", 1, "--block_size", 16]
        done = kvrt("batch", *given, *sizes, "--n_checkpoints", n, "--stats")
        assert done.code == 0, done.err
        assert ("context checkpoints" in done.err) == (n > 0)
        found.append([json.loads(x) for x in out.read_text().splitlines()])
    assert [x["tokens"] for x in found[0]] == [x["tokens"] for x in found[1]]
    n_cached = {x["id"]: x["n_cached"] for x in found[1]}
    assert n_cached[1] >= 160 and n_cached[2] >= 96


def test_checkpoints_without_a_prefix_cache_are_refused(batch):
    done, _ = batch("--n_checkpoints", 4, "--noprefix_cache")
    fails(done, 2, "--n_checkpoints are found in the prefix cache; leave out --noprefix_cache")


@pytest.mark.slow
def test_a_damaged_session_is_left_out_with_a_line(batch, folder):
    path = max(folder.glob("*.kv"), key=lambda p: p.stat().st_size)
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(bytes(data))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    done, found = batch("--session_dir", folder)
    assert done.code == 0, done.err
    (line,) = (x for x in done.err.splitlines() if str(path) in x)
    assert "damaged" in line
    assert "sessions   0 of " in done.err
    _, wanted = batch(out="without.jsonl")
    assert {k: r["tokens"] for k, r in found.items()} == {k: r["tokens"] for k, r in wanted.items()}


@pytest.mark.slow
def test_sessions_of_other_types_are_counted_with_the_flags_that_take_them(batch, folder, go):
    older = ("--dtype", "f32", "--cache_type_k", "f32", "--cache_type_v", "f32")
    done, _ = batch("--session_dir", folder, *older)
    assert "sessions   0 of " in done.err
    (line,) = [x.strip() for x in done.err.splitlines() if "passed over" in x]
    taken = "--dtype int8 --cache_type_k f16 --cache_type_v f16"
    assert line == f"2 sessions there were passed over; of this model they serve 2 with {taken}"
    done, found = batch("--session_dir", folder, *taken.split(), out="taken.jsonl")
    assert found["r0"]["n_cached"] > 0 and "passed over" not in done.err
    past = folder.with_name("past")
    past.mkdir()
    assert go("-p", BOOK, "--session", past, "-n", 1, *older, prompt=False).code == 0
    done, _ = batch("--session_dir", past, out="default.jsonl")
    (line,) = [x.strip() for x in done.err.splitlines() if "passed over" in x]
    wanted = f"they serve 1 with {' '.join(older)}"
    assert line == f"1 session there was passed over; of this model {wanted}"


@pytest.mark.slow
def test_a_folder_that_cannot_serve_is_refused(batch, tmp_path):
    fails(batch("--session_dir", tmp_path / "nowhere")[0], 2, "no such folder of sessions")
    refused = batch("--session_dir", tmp_path, "--noprefix_cache")[0]
    fails(refused, 2, "--session_dir puts sessions into the prefix cache; leave out --noprefix")

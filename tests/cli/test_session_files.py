"""What is said of a session, and what is made of it, without a run."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import BOOK, tiny_gguf

from kvrt import session
from kvrt.cellcache.history import tokens
from kvrt.errors import KvrtError
from kvrt.session import described
from kvrt.session.interop import llama, mlx
from kvrt.session.kv_file import file as kv_file

ROOT = Path(__file__).parents[2]


def ids_of(path):
    return tokens(session.read(path).history, 0).tolist()


def refused(done, code, *parts):
    assert (done.code, done.out) == (code, b""), done.err
    assert done.err.count("\n") == 1 and done.err.startswith("kvrt: ")
    for part in parts:
        assert part in done.err


def test_inspect_says_what_is_held(kvrt, prefilled, tiny, tmp_path):
    done = kvrt("inspect", prefilled)
    text = done.out.decode()
    assert (done.code, done.err) == (0, "")
    n = len(ids_of(prefilled))
    for part in ("book.kv", "model name", "model arch", "llama", "model weights", "kv_heads"):
        assert part in text
    facts = json.loads(kvrt("inspect", prefilled, "--json", "--cells", "--tokens").out)
    assert facts["n_bytes"] == prefilled.stat().st_size and facts["n_waste_bytes"] == 0
    assert facts["model"]["name"] == tiny.stem
    (listed,) = json.loads(kvrt("ls", prefilled.parent, "--json").out)
    assert listed["model"] == tiny.stem and tiny.stem in kvrt("ls", prefilled.parent).out.decode()
    assert facts["sequences"] == [
        {
            "sequence": 0,
            "tokens": n,
            "exact": n,
            "pos_min": 0,
            "pos_max": n - 1,
            "logits": True,
            "drawn": 0,
            "ga_i": 0,
            "policy": "name=ContextShift n_keep=0",
        }
    ]
    (group,) = facts["groups"]
    # One layer, K and V, two heads of 32 channels of two bytes: what is more is a header.
    assert 0 < group["bytes"] - n * 2 * 2 * 32 * 2 < 400
    assert (group["cells"], group["used"], group["lost"]) == (64, n, 0)
    assert facts["cells"] == [["0" * n + "." * (64 - n)]]
    assert facts["tokens"] == {"0": ids_of(prefilled)}
    html = tmp_path / "map.html"
    done = kvrt("inspect", prefilled, "--cells", "--tokens", "-m", tiny, "--html", html)
    assert BOOK in done.out.decode() and "0" * n + "." in done.out.decode()
    page = html.read_text()
    assert "0" * n + "." in page and "<script" not in page and "src=" not in page
    assert done.code == 0


def test_what_a_file_says_is_escaped(kvrt, prefilled, tmp_path):
    name = tmp_path / "<b>&.kv"
    old = session.read(prefilled)
    said = dict(old.fingerprint)
    said["model"] = {**said["model"], "arch": "<script>\x1b[31m"}
    session.save(name, dataclasses.replace(old, fingerprint=said))
    html = tmp_path / "map.html"
    done = kvrt("inspect", name, "--html", html)
    assert done.code == 0 and b"\x1b" not in done.out and b"\\x1b" in done.out
    page = html.read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;b&gt;&amp;.kv" in page


def test_verify_tells_sound_from_damaged_and_foreign(kvrt, prefilled, tiny, tmp_path):
    done = kvrt("verify", prefilled)
    assert (done.code, done.err) == (0, "") and b"book.kv: sound, " in done.out
    other = tmp_path / "other.gguf"
    tiny_gguf.write_gguf(other, tiny_gguf.TinyModel(n_layers=1, seed=3))
    refused(
        kvrt("verify", prefilled, "-m", other),
        2,
        "book.kv",
        "made with the model tiny, this is other (model.weights differs)",
    )
    data = bytearray(prefilled.read_bytes())
    for at in (4200, len(data) // 2, len(data) - 10):
        bad = tmp_path / "bad.kv"
        bad.write_bytes(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])
        refused(kvrt("verify", bad), 1, "bad.kv")
    bad.write_bytes(data[:-1])
    refused(kvrt("verify", bad), 1, "truncated")
    refused(kvrt("verify", tmp_path / "none.kv"), 2, "no such file")
    refused(kvrt("inspect", tiny), 1, "session")


@pytest.mark.slow
def test_a_probe_compares_logits(kvrt, book, tiny, tmp_path):
    exact = tmp_path / "exact.kv"
    prefill = ["prefill", "-m", tiny, "-c", 64, "-f", book, "--dtype", "f32", "-o", exact]
    prefill += ["--cache_type_k", "f32", "--cache_type_v", "f32"]
    assert kvrt(*prefill).code == 0
    done = kvrt("verify", exact, "-m", tiny, "--check_logits")
    assert done.code == 0, done.err
    said = done.out.decode()
    assert "fits " in said and "logits of the last token differ by" in said
    assert float(said.split("differ by ")[1].split()[0]) < 1e-4
    cut = tmp_path / "cut.kv"
    assert kvrt("fork", exact, "--at", 9, "-o", cut, "--quiet").code == 0
    assert b"no logits to compare" in kvrt("verify", cut, "-m", tiny, "--check_logits").out
    # Rows that are sound and of this model by name, but not by their values.
    old = session.read(exact)
    for block in old.groups[0].blocks:
        block.v.setflags(write=True)
        block.v[...] = 9.0
    kv_file.save(cut, old, anew=True)
    refused(
        kvrt("verify", cut, "-m", tiny, "--check_logits"), 1, "the logits of the last token differ"
    )


def test_explain_shows_the_first_difference(kvrt, prefilled, tiny, tmp_path):
    new = tmp_path / "new.txt"
    new.write_text(BOOK.replace("land", "lamp"))
    explain = ["explain", prefilled, "-m", tiny, "-f", new]
    told = json.loads(kvrt(*explain, "--json").out)
    first = told["first_difference"]
    assert told["n_reused"] == first["at"] > 5
    held, wanted = first["held"], first["wanted"]
    assert BOOK.replace("land", "lamp").find(wanted) > 0 and held in BOOK and held != wanted
    done = kvrt(*explain)
    text = done.out.decode()
    assert done.code == 0 and f"first difference at token {first['at']}" in text
    assert json.dumps(held) in text and json.dumps(wanted) in text
    assert "differ from the session" in text
    new.write_text(BOOK)
    same = kvrt(*explain).out.decode()
    assert "the last token, always recomputed" in same and "first difference" not in same


def test_explain_wants_the_tokenizer(kvrt, prefilled, tmp_path, tiny):
    other = tmp_path / "other.gguf"
    shutil.copy(tiny, other)
    data = other.read_bytes()
    key = b"tokenizer.ggml.eos_token_id"
    at = data.index(key) + len(key) + 4
    other.write_bytes(data[:at] + (5).to_bytes(4, "little") + data[at + 4 :])
    refused(kvrt("explain", prefilled, "-m", other, "-p", "x"), 2, "its tokenizer is")


def test_a_fork_holds_the_first_tokens(kvrt, prefilled, tmp_path):
    kept, new = prefilled.read_bytes(), tmp_path / "b.kv"
    done = kvrt("fork", prefilled, "--at", 12, "-o", new)
    assert done.code == 0 and "12 of " in done.err
    assert ids_of(new) == ids_of(prefilled)[:12] and prefilled.read_bytes() == kept
    refused(kvrt("fork", prefilled, "--at", 12, "-o", new), 2, "is there already")
    none = tmp_path / "c.kv"
    refused(kvrt("fork", prefilled, "--at", 999, "-o", none), 2, "the session holds")
    assert not none.exists()


@pytest.mark.slow
def test_a_fork_goes_on_like_its_text(kvrt, go, prefilled, tmp_path):
    new, ids = tmp_path / "b.kv", tmp_path / "ids.json"
    kvrt("fork", prefilled, "--at", 12, "-o", new)
    ids.write_text(json.dumps([*ids_of(new), 7, 8, 9]))
    run = ["--tokens", ids, "--json", "--quiet"]
    plain = json.loads(go(*run, prompt=False).out)
    found = json.loads(go(*run, "--session", new, prompt=False).out)
    assert (found["n_restored"], found["n_recomputed"]) == (12, 3)
    assert found["tokens"] == plain["tokens"]


def test_trim_drops_what_was_replaced(kvrt, prefilled):
    old = session.read(prefilled)
    for drawn in range(1, 4):
        draws = {0: session.SamplingState(token=1, n_drawn=drawn, sampling={})}
        session.save(prefilled, dataclasses.replace(old, draws=draws))
    before = json.loads(kvrt("inspect", prefilled, "--json").out)
    assert before["n_waste_bytes"] > 0
    done = kvrt("trim", prefilled)
    assert done.code == 0 and "less than before" in done.err
    after = json.loads(kvrt("inspect", prefilled, "--json").out)
    assert after["n_waste_bytes"] == 0 and after["n_bytes"] < before["n_bytes"]
    assert after["sequences"] == before["sequences"]
    ids = ids_of(prefilled)
    assert kvrt("trim", prefilled, "--keep", 5, "--quiet").code == 0
    assert ids_of(prefilled) == ids[:5]


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32", "q8_0", "int4"])
def test_convert_changes_rows_and_fingerprint(kvrt, prefilled, tmp_path, kind):
    new = tmp_path / "b.kv"
    assert kvrt("convert", prefilled, "--to", kind, "-o", new, "--quiet").code == 0
    assert session.read_manifest(new).fingerprint["type_k"] == kind
    assert ids_of(new) == ids_of(prefilled) and kvrt("verify", new).code == 0


@pytest.mark.parametrize("kind", ["llama.cpp", "llama.cpp-slot", "mlx"])
@pytest.mark.parametrize("old", [False, True])
def test_convert_for_other_programs(kvrt, prefilled, tmp_path, kind, old):
    new = tmp_path / "b.bin"
    words = ["--to", kind, "-o", new, "--quiet", *(["--legacy_format"] if old else [])]
    done = kvrt("convert", prefilled, *words)
    assert (done.code, done.err) == (0, "")
    mine = session.read(prefilled)
    said, groups = mine.fingerprint, described.groups(mine.fingerprint)
    reader = mlx if kind == "mlx" else llama
    found = reader.read(new, said, groups, arch=described.arch(said), n_vocab=300)
    assert tokens(found.history, 0).tolist() == ids_of(prefilled)
    np.testing.assert_array_equal(found.groups[0].blocks[0].k, mine.groups[0].blocks[0].k)
    np.testing.assert_array_equal(found.groups[0].blocks[0].v, mine.groups[0].blocks[0].v)


def test_what_other_programs_have_not(kvrt, go, prefilled, tmp_path):
    old, new = session.read(prefilled), tmp_path / "b.bin"
    read = tmp_path / "read.kv"
    extend = {"ga_n": 2, "ga_w": 8, "kind": "paper"}
    said = {**old.fingerprint, "rope": "read", "self_extend": extend}
    session.save(read, dataclasses.replace(old, fingerprint=said))
    refused(kvrt("convert", read, "--to", "llama.cpp", "-o", new), 2, "SelfExtend as in the paper")
    refused(
        kvrt("convert", read, "--to", "f16", "--legacy_format", "-o", new),
        2,
        "--legacy_format says",
    )
    assert not new.exists() and not list(tmp_path.glob("*.tmp"))


def test_what_cannot_be_converted_to(kvrt, prefilled, tmp_path):
    new = tmp_path / "b.kv"
    done = kvrt("convert", prefilled, "--to", "q4_0", "-o", new)
    refused(done, 2, "--to", "q4_0")
    assert not new.exists()


@pytest.mark.slow
def test_a_converted_session_is_restored(kvrt, go, prefilled, book, tmp_path):
    new = tmp_path / "b.kv"
    kvrt("convert", prefilled, "--to", "bf16", "-o", new)
    found = json.loads(
        go("-f", book, "--json", "--quiet", "--session", new, "-n", 3, prompt=False).out
    )
    assert found["n_recomputed"] == 1


@pytest.fixture
def folder(tmp_path, prefilled):
    """Two sessions and a note."""
    path = tmp_path / "sessions"
    path.mkdir()
    shutil.copy(prefilled, path / "a.kv")
    os.utime(path / "a.kv", (1, 1))
    shutil.copy(prefilled, path / "b.kv")
    (path / "note.txt").write_text("x")
    return path


def test_ls_and_prune(kvrt, folder):
    done = kvrt("ls", folder)
    assert done.code == 0 and b"a.kv" in done.out and b"b.kv" in done.out
    assert done.err.count("\n") == 1 and "note.txt" in done.err
    found = json.loads(kvrt("ls", folder, "--json", "--rebuild").out)
    assert [os.path.basename(x["path"]) for x in found] == ["b.kv", "a.kv"]
    size = found[0]["n_bytes"]
    assert size == (folder / "a.kv").stat().st_size
    done = kvrt("prune", folder, "--budget", size)
    assert done.code == 0 and "1 of 2 sessions deleted" in done.err
    lines = {
        words[0]: words[1:] for words in map(str.split, done.out.decode().splitlines()) if words
    }
    assert "deleted" in lines["a.kv"] and "recently;" in lines["a.kv"]
    assert "kept" in lines["b.kv"] and "kept" in lines["note.txt"]
    assert sorted(x.name for x in folder.glob("*.*") if x.suffix in (".kv", ".txt")) == [
        "b.kv",
        "note.txt",
    ]
    done = kvrt("prune", folder, "--budget", "0", "--quiet")
    assert (done.code, done.err) == (0, "") and not list(folder.glob("*.kv"))


def test_prune_goes_by_the_times_of_files_that_are_not_in_the_index(kvrt, tmp_path, prefilled):
    folder = tmp_path / "sessions"
    folder.mkdir()
    # Names, accesses and changes in three orders; what counts is the later of the two times.
    times = {"a.kv": (900, 100), "b.kv": (200, 250), "c.kv": (100, 800), "d.kv": (300, 300)}
    for name, (read, changed) in times.items():
        shutil.copy(prefilled, folder / name)
        os.utime(folder / name, (read, changed))
    size = prefilled.stat().st_size
    prune = ["prune", folder, "--budget", 2 * size, "--json", "--quiet"]

    def facts(*words):
        done = kvrt(*prune, *words)
        assert (done.code, done.err) == (0, "")
        return json.loads(done.out)

    def names(entries):
        return [os.path.basename(e["path"]) for e in entries]

    before = {p.name: p.stat() for p in folder.iterdir()}
    for _ in range(2):
        told = facts("--dry_run")
        assert names(told["deleted"]) == ["b.kv", "d.kv"]
        assert names(told["kept"]) == ["c.kv", "a.kv"]
        assert [e["used_ns"] for e in told["kept"]] == [800 * 10**9, 900 * 10**9]
        assert all("used least recently" in e["why"] for e in told["deleted"])
    # A dry run makes no index, and is no use of a session.
    assert {p.name: p.stat() for p in folder.iterdir()} == before
    assert facts()["deleted"] == told["deleted"]
    assert sorted(p.name for p in folder.iterdir()) == ["a.kv", "c.kv", "index.sqlite3"]


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["prune", "--budget", "0"]])
def test_a_folder_without_sessions_stays_as_it_is(kvrt, tmp_path, words):
    folder = tmp_path / "documents"
    folder.mkdir(mode=0o755)
    (folder / "note.txt").write_text("x")
    before = folder.stat()
    done = kvrt(words[0], folder, *words[1:])
    assert done.code == 0 and os.listdir(folder) == ["note.txt"]
    after = folder.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_ls_of_a_folder_that_cannot_be_written(kvrt, folder, monkeypatch):
    def refuse(folder, *, make=False):
        raise KvrtError("index.sqlite3 cannot be made: read-only file system")

    monkeypatch.setattr("kvrt.session.library.index.writing", refuse)
    done = kvrt("ls", folder, "--json")
    assert done.code == 0 and len(json.loads(done.out)) == 2
    assert "read-only file system" in done.err


def test_what_only_looks_at_files_imports_no_jax(folder):
    one = str(folder / "a.kv")
    calls = [
        ["ls", str(folder)],
        ["inspect", one, "--cells", "--tokens"],
        ["verify", one],
        ["prune", str(folder), "--budget", "1GB"],
        ["verify", str(folder / "note.txt")],
    ]
    code = (
        "import sys\n"
        "from kvrt.cli.main import main\n"
        f"assert [main(words) for words in {calls}] == [0, 0, 0, 0, 1]\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'orbax', 'kvrt_models'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "a.kv: sound" in done.stdout and "model arch" in done.stdout


def test_no_folder(kvrt, prefilled, tmp_path):
    refused(kvrt("ls", tmp_path / "none"), 2, "is no folder")
    refused(kvrt("prune", prefilled, "--budget", "1"), 2, "is no folder")
    assert not (tmp_path / "none").exists()


def test_explain_of_a_folder_takes_the_session_that_shares_most(kvrt, folder, prefilled, tiny):
    kvrt("trim", folder / "a.kv", "--keep", 4, "--quiet")
    (folder / "a.kv~").unlink()  # It would be one of the folder's sessions.
    kvrt("ls", folder, "--rebuild")
    explain = ["explain", folder, "-m", tiny, "-p", BOOK[: len(BOOK) // 2] + " zzz"]
    told = json.loads(kvrt(*explain, "--json").out)
    n = told["folder"]["n_common"]
    assert told["folder"] == {
        "session": "b.kv",
        "n_common": n,
        "others": [],
        "n_sessions": 2,
        "leaves": ["b.kv"],
    }
    assert told["n_reused"] == n > 4
    text = kvrt(*explain).out.decode()
    assert "2 sessions of this kind" in text and f"b.kv shares the first {n:,} tokens" in text
    assert f"first difference at token {n}" in text
    # Both begin alike: the shorter one is as good.
    told = json.loads(kvrt("explain", folder, "-m", tiny, "-p", BOOK[:1], "--json").out)
    assert told["folder"]["others"]


def test_explain_of_a_folder_without_sessions_of_the_model(kvrt, tmp_path, tiny):
    (tmp_path / "none").mkdir()
    refused(kvrt("explain", tmp_path / "none", "-m", tiny, "-p", "x"), 2, "no indexed session")

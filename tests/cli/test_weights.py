"""The type of the weights: int8 by default on a CPU, that of a session where one is resumed."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest

from kvrt import session
from kvrt.cli.flags.evaluate import MatrixDtype
from kvrt.cli.setup.model import WeightsChoice
from kvrt.session import fingerprint
from kvrt_models import load
from kvrt_models.layers import int8
from kvrt_models.weights import quantized
from kvrt_models.weights.types import WeightType


def weights(done) -> str:
    """What the summary says of them."""
    assert done.code == 0, done.err
    (line,) = [x for x in done.err.splitlines() if x.startswith("weights")]
    return line.removeprefix("weights").strip()


def test_the_flag_knows_all_types():
    assert get_args(MatrixDtype) == get_args(WeightType)


def test_the_summary_names_matrices_that_int8_would_lose(tiny, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "one"))
    chosen = WeightsChoice(dtype="int8", why="default on cpu")
    assert chosen.note(load.open_model(tiny, dtype="int8")) == "int8 (default on cpu)"
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(quantized, "MOST_ERROR", 0.0)
    told = chosen.note(load.open_model(tiny, dtype="int8"))
    begin = "int8 (default on cpu); 6 in bf16 for what int8 would lose: "
    names = r"([\w.+]+ \(an error of \d\.\d %\)(, )?){3} and 3 more"
    assert told.startswith(begin) and re.fullmatch(names, told.removeprefix(begin)), told


def test_the_summary_counts_matrices_that_are_as_the_file_has_them(tiny, cache, monkeypatch):
    opened = load.open_model(tiny, dtype="int8")
    shapes = dict(opened.weights.shapes)
    matrices = [name for name, x in shapes.items() if isinstance(x, int8.Int8Matrix)]
    for n, told in ((1, "1 matrix"), (2, "2 matrices")):
        name = matrices[n]
        shapes[name] = int8.shapes((40, 64), in_blocks=True)
        weights = dataclasses.replace(opened.weights, shapes=shapes)
        note = WeightsChoice(dtype="int8").note(dataclasses.replace(opened, weights=weights))
        assert note == f"int8; {told} as Q8_0 in the file"


@pytest.mark.slow
def test_the_summary_of_a_run_names_them(go, tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path))
    monkeypatch.setattr(quantized, "MOST_ERROR", 0.0)
    told = weights(go("-n", 2))
    assert told.startswith("int8 (default on cpu); 6 in bf16 for what int8 would lose: ")


@pytest.mark.slow
def test_the_default_and_a_flag(go):
    assert weights(go("-n", 2)) == "int8 (default on cpu)"
    assert weights(go("-n", 2, "--dtype", "f32")) == "f32"


def test_another_type_than_the_session_has_is_refused(kvrt, prefilled, tiny):
    said = session.open_session(prefilled).manifest.fingerprint
    assert said["model"]["weight_type"] == "int8"
    for words in (
        ("ask", prefilled, "which"),
        ("run", "--session", prefilled),
        ("verify", prefilled),
    ):
        done = kvrt(*words, "-m", tiny, "--dtype", "f32")
        line = "the session was written with int8 weights, --dtype f32 here; leave --dtype out"
        assert (done.code, done.out) == (2, b"") and done.err.count("\n") == 1
        assert line in done.err and str(prefilled) in done.err


@pytest.mark.slow
def test_a_session_has_its_type(go, kvrt, tiny, tmp_path):
    wide, small = tmp_path / "wide.kv", tmp_path / "small.kv"
    go("--session", wide, "--dtype", "f32")
    go("--session", small)
    said = session.open_session(wide).manifest.fingerprint
    assert said["model"]["weight_type"] == "f32"
    assert weights(go("--session", wide, "-n", 2)) == "f32 (as the session)"
    assert weights(go("--session", small, "-n", 2)) == "int8 (as the session)"
    assert weights(go("--session", small, "-n", 2, "--dtype", "int8")) == "int8"
    for path in (wide, small):
        assert kvrt("verify", path, "-m", tiny, "--check_logits").code == 0
    assert kvrt("ask", wide, "which", "-m", tiny, "-n", 2).code == 0


def without_type(path: Path, another: str | None = None) -> None:
    """Writes a session as it was before its fingerprint named the type, or with another name."""
    found = session.read(path)
    said = {**found.fingerprint, "model": dict(found.fingerprint["model"])}
    before = fingerprint.digest(said)
    del said["model"]["weight_type"]
    if another is not None:
        said["model"]["weight_type"] = another
    assert fingerprint.digest(said) == before
    object.__setattr__(found, "fingerprint", said)
    path.unlink()
    session.save(path, found)


@pytest.mark.slow
def test_an_older_session_is_taken_for_f32(go, tmp_path):
    path = tmp_path / "older.kv"
    go("--session", path, "--dtype", "f32")
    without_type(path)
    done = go("--session", path, "-n", 2)
    assert weights(done) == "f32 (as older sessions)" and "restored in" in done.err
    path.unlink()
    go("--session", path, "--dtype", "bf16")
    without_type(path)
    done = go("--session", path, "-n", 2)
    assert done.code == 2 and "which may have been bf16 or f16" in done.err
    assert weights(go("--session", path, "-n", 2, "--dtype", "bf16")) == "bf16"


def test_a_session_of_an_unknown_type_is_refused(prefilled, tiny, kvrt):
    without_type(prefilled, "int3")
    done = kvrt("ask", prefilled, "which", "-m", tiny)
    assert done.code == 1 and "written with weights of type 'int3', known are f32" in done.err


@pytest.mark.slow
def test_a_folder_of_sessions_has_the_type_of_its_newest(go, tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    go("--session", folder, "--dtype", "f32")
    done = go("--session", folder, "-n", 2)
    assert weights(done) == "f32 (as the session)"
    assert "restored in" in done.err and "0 computed" not in done.err
    shutil.rmtree(folder)
    folder.mkdir()
    assert weights(go("--session", folder, "-n", 2)) == "int8 (default on cpu)"


@pytest.mark.slow
def test_a_batch_resumes_with_the_type_of_its_results(kvrt, tiny, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    fixed = ["batch", "-m", tiny, "-i", given, "-o", out, "-c", 256, "--temp", 0, "-n", 2]
    fixed += ["--n_batch", 8, "--n_seq_max", 4, "--block_size", 8]  # those of test_batch.py
    lines = [json.dumps({"id": name, "prompt": "the sand"}) + "\n" for name in "ab"]
    for dtype, why in (("f32", "f32 (as the results that are there)"), (None, None)):
        given.write_text(lines[0])
        first = kvrt(*fixed, *([] if dtype is None else ["--dtype", dtype]))
        why = why or "int8 (default on cpu)"
        assert weights(first) == (dtype or why)
        given.write_text("".join(lines))
        assert weights(kvrt(*fixed)) == why
        assert len(out.read_text().splitlines()) == 2
        refused = kvrt(*fixed, "--dtype", "bf16")
        assert refused.code == 2 and "made with other flags" in refused.err
        out.unlink()

"""The scripts as they are run, on the real models, over as little as shows something."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]


def run(script, *flags):
    """The lines of JSON, the exit status and what was said beside them."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *flags],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return list(map(json.loads, done.stdout.splitlines())), done.returncode, done.stderr


def test_a_key_is_found_where_it_is_still_in_a_cell(tmp_path):
    flags = ("--lengths=400", "--depths=0,1", "--modes=full,sinks", "--n_ctx=256")
    out = tmp_path / "lines.jsonl"
    lines, status, said = run("passkey.py", *flags, f"--out={out}")
    assert status == 0 and lines == [], said
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(line["mode"], line["depth"]): line["found"] for line in lines}
    assert found == {("full", 0): 1, ("full", 1): 1, ("sinks", 0): 0, ("sinks", 1): 1}
    assert all(395 < n <= 400 for line in lines for n in line["n_tokens"])
    assert {line["n_dropped"] > 0 for line in lines if line["mode"] == "sinks"} == {True}


def test_a_grid_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "grid.png"
    flags = ("--lengths=150", "--depths=0.5", "--modes=full", f"--plot={picture}")
    lines, status, said = run("passkey.py", *flags)
    assert status == 0 and len(lines) == 1, said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--modes=cache",), "SelfExtend of kind 'cache' cannot reach layers"),
        (("--lengths=20",), "a prompt of 20 tokens has no room for filler"),
        (("--depths=0,2",), "--depths 0,2: give numbers from 0 to 1"),
        (("--lengths=many",), "--lengths many: "),
        (("--out=/nowhere/lines.jsonl", "--lengths=100"), "--out /nowhere/lines.jsonl: "),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(flags, wanted):
    lines, status, said = run("passkey.py", "--modes=full", *flags)
    assert (lines, status) == ([], 2)
    assert said.count("\n") == 1 and said.startswith(f"passkey: {wanted}")


def test_sinks_lose_little_and_a_window_without_them_much():
    flags = ("--n_tokens=2048", "--n_window=1024", "--chunk=64", "--segment=1024")
    lines, status, said = run("perplexity.py", "--modes=sinks,window,recompute", *flags)
    assert status == 0, said
    sinks, window, again = lines
    assert (
        sinks["perplexity"][0] == window["perplexity"][0] == pytest.approx(again["perplexity"][0])
    )
    assert sinks["beyond_window"] < 1.35 * again["beyond_window"]
    assert window["beyond_window"] > 1.7 * sinks["beyond_window"]
    assert len(set(sinks["cache_bytes"])) == 1 and sinks["n_shift"] == 16


def test_keys_in_f16_bear_evictions():
    lines, status, said = run("evictions.py", "--type=f32", "--type=f16", "--n_evictions=20")
    assert status == 0, said
    f32, f16 = lines
    assert f32["n_evictions"] == f16["n_evictions"] == f16["n_kshift"] == 20
    assert f32["all"]["logits_max"] < 1e-2 < f16["all"]["logits_max"] < 1
    assert f16["all"]["kl_mean"] < 1e-3

"""What `kvrt run` and `kvrt batch` wrote before is resumed; see tests/data/before_16."""

import json
import shutil
from pathlib import Path

import pytest

from kvrt import session

BEFORE = Path(__file__).parents[1] / "data" / "before_16"
RUN = ("--temp", "0.5", "--seed", "3", "--n_ctx", "128")
BATCH = ("--n_ctx", "128", "--n_seq_max", "2", "--n_predict", "5", "--temp", "0")


@pytest.fixture
def before(tmp_path):
    for name in ("tiny.gguf", "run.kv", "batch.in.jsonl", "batch.out.jsonl"):
        shutil.copy(BEFORE / name, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_goes_on(kvrt, before):
    wanted = json.loads((BEFORE / "expected.json").read_text())["run"]
    held = session.read(before / "run.kv").history.pieces[0][0][1].tolist()
    assert held == wanted["tokens"]["0"]
    asked = ("-m", before / "tiny.gguf", *RUN, "-n", 4, "--session", before / "run.kv")
    done = kvrt("run", *asked, "--append", "-p", " of", "--json", "--quiet")
    assert done.code == 0, done.err
    assert json.loads(done.out)["n_restored"] == len(held)


def test_results_of_a_batch_stand(kvrt, before):
    out = before / "batch.out.jsonl"
    kept = out.read_bytes()
    given = ("-m", before / "tiny.gguf", "-i", before / "batch.in.jsonl", "-o", out)
    done = kvrt("batch", *given, *BATCH)
    assert done.code == 0, done.err
    assert out.read_bytes() == kept and not out.with_name("batch.out.jsonl~").exists()

"""`kvrt batch --mesh`: the lines of one device, and what is refused."""

import json
import time

import pytest
from test_batch_process import wait_for
from test_mesh_run import MESH, both, on_simulated, together

MEETING = ["--mesh", MESH, "--coordinator", "here:1", "--n_processes", 2]


@pytest.fixture
def words(tiny, tmp_path):
    """A batch whose requests share a beginning, draw, and have samples."""
    lines = [
        {"id": "a", "tokens": list(range(40, 60)), "n_predict": 6, "temp": 0},
        {"id": "b", "tokens": list(range(40, 63)), "n_predict": 5, "temp": 1.0, "seed": 3, "n": 2},
        {"id": "c", "prompt": "the otter", "n_predict": 7, "top_k": 4, "seed": 1},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fixed = ["-c", 96, "--n_batch", 8, "--n_seq_max", 2, "--block_size", 8, "--ignore_eos"]
    return ["batch", "-m", tiny, "-i", path, *fixed, "-o"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--mesh", "tensor=2,head=2"], "axis 'head' is unknown; axes are tensor, context"),
        (["--mesh", "context=0"], "--mesh axis context is 0; at least 1"),
        (["--mesh", "context=1000"], "needs 1000 devices, there are"),
        (
            ["--mesh", MESH, "--coordinator", "here:1"],
            "--process_id 0 of --n_processes 0: processes are numbered from 0",
        ),
        ([*MEETING, "--seed", "-1"], "--seed -1 is another one in each process of --coordinator"),
        ([*MEETING, "--seed", "1", "-i", "-"], "-i and -o are files with --coordinator"),
    ],
)
def test_what_makes_no_mesh_is_told_in_a_line(kvrt, words, tmp_path, flags, told):
    out = tmp_path / "out.jsonl"
    done = kvrt(*words, out, *flags)
    assert done.code == 2
    assert told in done.err and done.err.count("\n") == 1
    assert done.out == b""
    assert not out.exists() or out.read_bytes() == b""


@pytest.mark.slow
def test_four_devices_write_the_lines_of_one(kvrt, words, cache, tmp_path):
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    assert kvrt(*words, one).code == 0
    tiers = ["--host_cache", "1MB", "--disk_cache", tmp_path / "blocks"]
    process = on_simulated(4, [*words, many, "--mesh", MESH, *tiers], cache)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, ""), err
    assert "requests   3 done\n" in err
    found = [json.loads(line) for line in one.read_text().splitlines()]
    assert sorted((r["id"], r["n_cached"] > 0) for r in found) == [
        ("a", False), ("b", True), ("b", True), ("c", False)
    ]  # fmt: skip
    assert many.read_text() == one.read_text()


@pytest.mark.slow
def test_two_processes_write_the_lines_of_one_and_go_on(kvrt, words, cache, tmp_path):
    """Process 0 alone reads and writes the results, and the other computes what it says is left."""
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    words = [*words[:-1], "--seed", 5, "-o"]
    assert kvrt(*words, one).code == 0
    lines = one.read_text().splitlines(keepends=True)
    many.write_text(lines[0])
    (code, out, err), other = both([*words, many, "--mesh", MESH], cache)
    assert (code, out) == (0, ""), err
    assert other == (0, "", "")
    assert "requests   2 done, 1 were there already" in err
    assert texts(many) == texts(one) and len(texts(one)) == 4


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_costs_no_finished_line(kvrt, words, cache, tmp_path):
    """JAX ends them when the dead one's heartbeat runs out; a later run does what is left."""
    many, n_lines = tmp_path / "many.jsonl", 24
    asked = [{"id": f"r{i}", "tokens": [40 + i % 9, 50], "n_predict": 40} for i in range(n_lines)]
    words[words.index("-i") + 1].write_text("".join(json.dumps(line) + "\n" for line in asked))
    sooner = "from kvrt.cli.process import startup; startup._HEARTBEAT_S = 6; "
    first, second = started = together([*words, many, "--mesh", MESH], cache, sooner)
    try:
        wait_for(many, 3, seconds=240)
        second.kill()
        killed = time.monotonic()
        _, err = first.communicate(timeout=60)
        assert first.returncode != 0, err
        assert "a step of all processes failed, as it does once one of them has ended: " in err
        assert time.monotonic() - killed < 60
    finally:
        for process in started:
            process.kill()
            process.communicate()
    done = [json.loads(line)["id"] for line in many.read_text().splitlines() if line.endswith("}")]
    assert 2 < len(done) < n_lines
    again = kvrt(*words, many)
    assert again.code == 0, again.err
    assert f"{n_lines - len(done)} done, {len(done)} were there already" in again.err


def texts(path):
    """What was sampled, whatever was found in the prefix cache."""
    found = map(json.loads, path.read_text().splitlines())
    return sorted((r["id"], r.get("sample", 0), r["tokens"], r["digest"]) for r in found)

"""`kvrt batch` as a process: interrupted, killed, on a terminal."""

import json
import os
import signal
import subprocess
import time

import pytest
from test_process import posix, read_all, start

pytestmark = pytest.mark.slow


@pytest.fixture
def words(tiny, tmp_path):
    """A batch of 30 requests that ends by itself after a while."""
    lines = [
        {
            "id": f"r{i}",
            "tokens": [i + 1, *range(50, 70)],
            "n_predict": 60,
            "seed": i,
            "n": 1 + i % 2,
        }
        for i in range(30)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fixed = ["-m", tiny, "-c", 400, "--n_batch", 8, "--n_seq_max", 3, "--ignore_eos", "--temp", 1]
    return ["batch", *fixed, "-i", path, "-o"]


def results(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({(r["id"], r.get("sample")) for r in found}) == len(found)
    return {(r["id"], r.get("sample")): (r["tokens"], r["text"], r["finish_reason"]) for r in found}


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(path, n, seconds=60):
    end = time.monotonic() + seconds
    while lines_of(path) < n:
        assert time.monotonic() < end, "no results"
        time.sleep(0.01)


@pytest.fixture
def whole(words, kvrt, tmp_path):
    """What the batch gives undisturbed: 30 requests, every second of which has two samples.

    The processes that follow find its programs in the cache folder.
    """
    path = tmp_path / "whole.jsonl"
    done = kvrt(*words, path)
    assert done.code == 0, done.err
    found = results(path)
    assert len(found) == 45
    return found


@posix
def test_whatever_ends_it_the_same_command_goes_on(words, whole, cache, kvrt, tmp_path, budget):
    """The codes of all signals are in test_signals.py."""
    path, metrics = tmp_path / "out.jsonl", tmp_path / "out.prom"
    words = [*words[:1], "--metrics", metrics, *words[1:]]
    seen = 0
    numbers = (signal.SIGTERM, signal.SIGKILL)
    for number in budget(numbers, (signal.SIGINT, *numbers, signal.SIGHUP)):
        metrics.unlink(missing_ok=True)
        process = start([*words, path], cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for(path, seen + 5)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        kills = number == signal.SIGKILL
        assert process.returncode == (-number if kills else 128 + number), err
        if not kills:
            assert b"are left, the same command resumes\n" in err and b"Traceback" not in err
            assert path.read_bytes().endswith(b"\n") and b"kvrt_" in metrics.read_bytes()
        seen = lines_of(path)
        assert seen < 45
    done = kvrt(*words, path)
    assert done.code == 0 and "were there already" in done.err, done.err
    assert results(path) == whole


@posix
def test_a_terminal_shows_a_bar(words, cache, tmp_path):
    import pty

    master, slave = pty.openpty()
    process = start([*words, tmp_path / "out.jsonl"], cache, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    shown = read_all(master)
    os.close(master)
    assert process.stdout is not None
    assert process.stdout.read() == b""
    process.stdout.close()
    assert process.wait(30) == 0
    bar, _, summary = shown.rpartition("requests   30 done")
    assert "/30" in bar and "tokens/s" in bar and "cache" in bar and "hits" in bar
    assert "prompt tokens were prefix hits" in summary and "Traceback" not in shown


def test_a_pipe_that_is_closed_ends_it_quietly(words, cache):
    process = start([*words, "-"], cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(b'{"id": "r')
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1 and b"Traceback" not in err, err

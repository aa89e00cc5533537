"""Two processes write one session: each its own shards, all of them or none."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from snapshots import assert_equal

from kvrt import session

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def both(folder):
    """What two processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-m", "tests.session.two_writers", str(port)]
    started = [
        subprocess.Popen(
            [*command, str(i), folder],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    try:
        done = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0, 0], done[0][1][-2000:] + done[1][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def test_each_writes_its_own_and_what_fails_in_one_fails_in_both(tmp_path):
    path = tmp_path / "x.kvd"
    first, second = both(tmp_path)
    no_room = "cannot be written: no space left on device; nothing is half written"
    assert second["no_room"].startswith(f"{path}: {no_room}")
    assert first["no_room"] == "process 1: no space left on device"
    assert (first["refused"], second["refused"]) == ("not now", "process 0: not now")
    assert "is no session and stays as it is" in first["foreign"]
    assert second["foreign"] == f"process 0: {first['foreign']}"
    for found in (first, second):
        assert (found["saved"], found["same"]) == (True, True)
        assert "taken by a folder alone; give a name in .orbax" in found["file"]
        assert "use session.save in each of them" in found["background"]
    # Two processes wrote half of it each, and what one process holds is not in the other's half.
    (rows,) = path.glob("rows-*")
    assert sorted(p.name for p in rows.glob("process-*")) == ["process-0", "process-1"]
    assert session.read_manifest(path).groups[0].division.writers == (0, 0, 1, 1)
    assert len(list(path.iterdir())) == 2
    # One process reads what two processes had, to the bit.
    assert_equal(session.read(path), session.read(tmp_path / "whole.kv"))

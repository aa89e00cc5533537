"""An engine of two processes: the tokens of one, and an error in both where they plan otherwise."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.two_engines import REQUESTS, made, served

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_two_processes_serve_as_one_and_notice_that_they_differ():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [_start(address, i) for i in range(2)]
    one = {mode: served(made(mode, None), REQUESTS) for mode in ("cell", "paged")}
    first, second = _run(processes)
    assert first == second
    assert one["cell"]["n_hit"] > 0 and one["paged"]["n_hit"] > 0
    assert (first["cell"], first["paged"]) == (one["cell"], one["paged"])
    assert first["sessions"].startswith("sessions in an engine of 2 processes: which sessions")
    assert first["differs"].startswith("process 1 plans step ")
    assert "give all processes the same requests in the same order" in first["differs"]
    assert first["again"].startswith("process 1 plans step ")


def _start(address, index):
    flags = "--xla_force_host_platform_device_count=2"
    env = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
    }
    command = [sys.executable, "-m", "tests.serving.two_engines", address]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, str(index)], cwd=ROOT, env=env, text=True, stdout=pipe, stderr=pipe
    )


def _run(processes):
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]

"""`kvrt run --mesh`: what is refused, and two processes that write what one writes."""

import json
import socket
import subprocess

import pytest
from conftest import PROMPT
from test_process import AS_HERE, start

from kvrt.session import read_manifest

MESH = "tensor=2,context=2"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--mesh", "tensor=2,head=2"], "axis 'head' is unknown; axes are tensor, context"),
        (["--mesh", "context=0"], "--mesh axis context is 0; at least 1"),
        (["--mesh", "context=1000"], "needs 1000 devices, there are"),
        (["--coordinator", "here:1"], "--coordinator joins processes for a mesh; add --mesh"),
        (["--n_processes", "2"], "--n_processes and --process_id need --coordinator"),
        (["--mesh", MESH, "--coordinator", "here"], "here has no port; HOST:PORT is wanted"),
        (["--mesh", MESH, "--coordinator", "here:0"], "here:0 has no port"),
        (["--mesh", MESH, "--coordinator", "here:1"], "--process_id 0 of --n_processes 0"),
        (
            ["--mesh", MESH, "--coordinator", "auto", "--process_id", "1"],
            "--coordinator auto finds the processes itself",
        ),
    ],
)
def test_what_makes_no_mesh_is_told_in_a_line(go, words, told):
    done = go(*words)
    assert done.code in (1, 2)
    assert told in done.err
    assert done.err.count("\n") == 1
    assert done.out == b""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two.kv", "two.orbax"])
def test_two_processes_write_what_one_writes_and_one_goes_on(go, tiny, cache, tmp_path, name):
    one = json.loads(go("--json", "-n", 14).out)
    session = tmp_path / name
    words = ["run", "-m", tiny, "-c", 64, "--temp", 0, "-p", PROMPT, "-n", 9, "--json"]
    words += ["--n_ubatch", 8]
    words += ["--session", session, "--session_all", "--mesh", MESH]
    first, second = both(words, cache)
    assert second == (0, "", "")
    code, out, err = first
    assert code == 0, err
    assert json.loads(out)["tokens"] == one["tokens"][:9]
    assert err.splitlines() == [f"{session}: nothing restored, 3 computed: no such session yet"]
    # A folder has what each device held, in parts; the second process none of so few tokens.
    parts = read_manifest(session).groups[0].division
    assert (parts and (len(parts.cells), parts.n_heads, parts.writers)) == (
        (2, 2, (0, 0, 1, 1)) if name == "two.orbax" else None
    )
    more = go("--json", "-n", 5, "--session", session, "--session_ro", prompt=False)
    assert json.loads(more.out)["tokens"] == one["tokens"][9:]


def on_simulated(n_devices, words, cache, before=""):
    """A process of the command with so many devices, which compiles quickly."""
    flags = f"{AS_HERE['XLA_FLAGS']} --xla_force_host_platform_device_count={n_devices}"
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    pipe = subprocess.PIPE
    return start(words, cache, before, env=env, text=True, stdout=pipe, stderr=pipe)


def together(words, cache, before=""):
    """Two processes with two devices each, which meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--coordinator", f"127.0.0.1:{port}", "--n_processes", 2, "--process_id"]
    return [on_simulated(2, [*words, *meet, i], cache, before) for i in range(2)]


def both(words, cache):
    """Code and outputs of two processes that meet."""
    started = together(words, cache)
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, *output) for p, output in zip(started, outputs, strict=True)]

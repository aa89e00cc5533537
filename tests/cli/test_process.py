"""What only a process of its own can show: signals, pipes, terminals, and a quiet start."""

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import PROMPT

from kvrt.cli.process import output

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "from kvrt.__main__ import enter; enter()")
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and devices")


def clean() -> dict[str, str]:
    """The environment without what JAX has set for this process."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TF_CPP"))}


# A process of the command compiles as this one does, so that it finds in the cache folder what a
# test has compiled here.
AS_HERE = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
}


def start(args, cache, before="", **streams) -> subprocess.Popen:
    """A process of the command, which does first what is said in Python."""
    env = clean() | AS_HERE | {"KVRT_CACHE": str(cache), "TERM": "xterm", "COLUMNS": "80"}
    env |= streams.pop("env", {})
    words = [str(arg) for arg in args]
    return subprocess.Popen(
        [*COMMAND[:2], before + COMMAND[2], *words],
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env=env,
        **streams,
    )


def run(program: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-c", program]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=clean() | AS_HERE)


@pytest.fixture
def words(go, tiny):
    """An endless run, whose programs are in the cache already."""
    assert go("--quiet").code == 0
    fixed = ["run", "-m", tiny, "-c", 64, "--temp", 0, "--n_ubatch", 8, "-p", PROMPT]
    return [*fixed, "-n", -1, "--ignore_eos"]


def read_all(file: int) -> str:
    """All that a terminal was sent, once its last writer has gone."""
    parts = []
    # Linux says EIO at the end, other systems give nothing.
    with contextlib.suppress(OSError):
        while part := os.read(file, 4096):
            parts.append(part)
    return b"".join(parts).decode()


@posix
def test_ctrl_c_ends_neatly_and_a_terminal_shows_a_bar(words, cache):
    import pty

    master, slave = pty.openpty()
    # A terminal that nobody reads is full after 20 kB of a spinner, and stops who writes.
    with ThreadPoolExecutor(1) as reader:
        process = start(words, cache, stdout=subprocess.PIPE, stderr=slave)
        os.close(slave)
        written = reader.submit(read_all, master)
        assert process.stdout is not None
        first = process.stdout.read(200)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        shown = written.result()
    os.close(master)
    process.stdout.close()
    assert process.wait(30) == 130
    assert len(first) == 200 and b"\x1b" not in first + rest
    bar, _, summary = shown.partition("\r\nprompt ")
    # The bar begins with the prompt not evaluated, and is taken away at its end.
    assert "prompt" in bar and "0/3" in bar and "\x1b[2K" in bar
    # What takes seconds is said from the beginning on.
    waits = ["starting JAX", "reading", "compiling programs", "3/3"]
    assert [bar.index(x) for x in waits] == sorted(bar.index(x) for x in waits)
    assert "interrupted" in summary and "tokens dropped" in summary and "tokens/s" in summary
    assert "Traceback" not in shown


@posix
def test_a_terminal_shows_the_prompt_before_its_continuation(words, cache, kvrt):
    import pty

    master, slave = pty.openpty()
    process = start([*words, "-n", 8], cache, stdout=slave, stderr=slave)
    os.close(slave)
    shown = read_all(master)
    os.close(master)
    assert process.wait(60) == 0
    text = kvrt(*words, "-n", 8, "--quiet").out.decode()
    text = output.without_controls(text).replace("\n", "\r\n")
    # Dim, and the text goes on in its line.
    assert f"\x1b[2m{PROMPT}\x1b[0m{text}" in shown


@posix
def test_a_second_ctrl_c_ends_a_process_that_is_busy():
    done = run(
        "import os, signal, time\n"
        "from kvrt.cli.process.interrupt import Interrupt\n"
        "with Interrupt() as interrupt:\n"
        "    assert not interrupt.asked\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while not interrupt.asked: time.sleep(0.001)\n"
        "    print('asked', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(30)\n"
        "print('never')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "asked\n", "")


@posix
def test_ctrl_c_is_given_back():
    done = run(
        "import os, signal\n"
        "from kvrt.cli.process.interrupt import Interrupt, Interrupted\n"
        "handler = signal.getsignal(signal.SIGINT)\n"
        "with Interrupt() as interrupt:\n"
        "    interrupt.check()\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    try: interrupt.check()\n"
        "    except Interrupted: print('heard')\n"
        "assert signal.getsignal(signal.SIGINT) is handler\n"
        "assert signal.set_wakeup_fd(-1) == -1\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n", "")


@posix
def test_a_reader_that_goes_away_is_no_mistake(words, cache):
    process = start(words, cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    # Empty: nothing that JAX or XLA logs at their start gets here either.
    assert (process.returncode, err) == (1, b"")


@posix
def test_a_full_disk_is_one_line(words, cache):
    for args in (words, ["run", "--help"]):
        with open("/dev/full", "wb") as full:
            process = start(args, cache, stdout=full, stderr=subprocess.PIPE)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 1
        assert err == (
            b"kvrt: standard output: no space left on device; free space or write elsewhere\n"
        )


@posix
def test_streams_that_are_closed():
    version = " ".join(COMMAND[:2]) + f" '{COMMAND[2]}' --version"
    for redirect, code, out, err in [(">&-", 1, "", "is closed"), ("2>&-", 0, "kvrt ", "")]:
        done = subprocess.run(
            ["sh", "-c", f"{version} {redirect}"], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == code and out in done.stdout and err in done.stderr
        assert done.stderr.count("\n") == bool(err)
    mistake = version.replace("--version", "fly") + " 2>&-"
    done = subprocess.run(["sh", "-c", mistake], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_device_that_is_not_there_is_one_line(words, cache):
    process = start(
        words,
        cache,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"JAX_PLATFORMS": "nowhere"},
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and out == b""
    assert err.count(b"\n") == 1 and err.startswith(b"kvrt: JAX finds no device: ")
    assert b"unset JAX_PLATFORMS" in err


def test_libraries_keep_off_standard_error():
    done = run(
        "import logging, os, warnings\n"
        "from kvrt.cli.process.output import own_process\n"
        "own_process()\n"
        "import jax\n"
        "for name in ('jax', 'jax._src.xla_bridge'):\n"
        "    logging.getLogger(name).warning(\"Unable to initialize backend 'tpu'\")\n"
        "assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == '3'\n"
        "warnings.warn('odd\\nnumbers')\n"
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "kvrt: warning: odd numbers\n"


UNUSED = (
    "gguf jinja2 jax.experimental.pallas kvrt.attention.pallas kvrt.cli.ask kvrt.cli.batch "
    "kvrt.serving orbax tensorstore torch transformers xllamacpp"
).split()


def test_a_plain_run_imports_no_module_that_it_does_not_use(words, cache):
    end = words.index(-1)
    args = [str(word) for word in (*words[:end], "1", *words[end + 1 :])]
    done = run(
        "import gc, os, sys\n"
        f"os.environ['KVRT_CACHE'] = {str(cache)!r}\n"
        f"sys.argv = ['kvrt', *{args!r}, '--quiet']\n"
        "from kvrt.__main__ import enter\n"
        "try:\n    enter()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert gc.get_threshold()[0] == 200_000\n"
        f"unused = {set(UNUSED)!r} & set(sys.modules)\n"
        "assert not unused, unused\n"
    )
    assert done.returncode == 0, done.stderr


def test_no_network_for_the_default_model(kvrt, tmp_path, monkeypatch):
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "empty"))
    # A port that nothing listens on, and no second try.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    done = kvrt("run", "-p", "Once", "--quiet")
    assert (done.code, done.out) == (1, b"") and done.err.count("\n") == 1
    assert "could not be fetched" in done.err and "-m FILE" in done.err
    assert not list((tmp_path / "empty" / "models").rglob("*.gguf"))

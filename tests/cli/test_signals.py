"""SIGINT, SIGTERM and SIGHUP end each stage of a command, and lose nothing that was to be kept."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrt import session
from kvrt.cellcache.history import tokens
from kvrt.cli.process.interrupt import Ended, Interrupt, Unwinding
from kvrt.cli.run import generation, kept_session, run_command
from kvrt.errors import BadLogits, KvrtError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
AFTER_PROMPT = kept_session.KeptSession.after_prompt
CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}


@pytest.fixture
def ids(tmp_path):
    """A file of token ids, n of them or those given."""

    def write(found):
        path = tmp_path / f"ids{len(list(tmp_path.iterdir()))}.json"
        path.write_text(
            json.dumps([i % 200 for i in range(found)] if isinstance(found, int) else found)
        )
        return path

    return write


def ids_of(path):
    return tokens(session.read(path).history, 0).tolist()


def python(program, **env):
    words = [sys.executable, "-c", program]
    return subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}, timeout=60
    )


@pytest.mark.parametrize("name", CODES)
def test_each_signal_has_its_exit_code(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert not interrupt.asked
        signal.raise_signal(number)
        assert interrupt.asked and interrupt.exit_code == CODES[name]
    with pytest.raises(Ended, match=f"interrupted by {name}") as ended, Unwinding():
        signal.raise_signal(number)
    assert ended.value.exit_code == CODES[name] and signal.getsignal(number) is before


def test_a_signal_that_the_parent_ignores_is_not_heard():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Unwinding(), Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_after_a_signal_is_one_line_and_the_exit_code_of_the_signal():
    with pytest.raises(Ended, match="no room") as ended, Interrupt():
        signal.raise_signal(signal.SIGHUP)
        raise KvrtError("no room")
    assert ended.value.exit_code == 129
    # Modules in the middle of their import make it another exception.
    with pytest.raises(Ended, match="SIGTERM"), Unwinding():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Ended:
            raise ImportError("initialization failed") from None


def test_a_signal_while_jax_is_imported_is_one_line():
    done = python(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'jax': os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['kvrt', 'doctor']\n"
        "from kvrt.__main__ import enter\n"
        "enter()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        143,
        "",
        "kvrt: interrupted by SIGTERM\n",
    )


def test_a_file_that_is_being_written_leaves_nothing(kvrt, prefilled, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: signal.raise_signal(signal.SIGTERM))
    done = kvrt("fork", prefilled, "--at", 5, "-o", prefilled.with_name("new.kv"))
    assert (done.code, done.err) == (143, "kvrt: interrupted by SIGTERM\n")
    assert not [x for x in os.listdir(prefilled.parent) if "new" in x and "lock" not in x]


@pytest.mark.slow
@pytest.mark.parametrize(
    "busy",
    [
        # A finalizer, where Python can raise nothing, and a library that swallows everything.
        "class Last:\n    def __del__(self): signal.raise_signal(signal.SIGHUP)\nLast()\n",
        "try: signal.raise_signal(signal.SIGHUP)\nexcept BaseException: pass\n",
    ],
)
def test_a_swallowed_exception_does_not_keep_the_process(busy):
    lines = (busy + "time.sleep(50)").replace("\n", "\n    ")
    done = python(
        "import signal, time\n"
        "from kvrt.cli.process.interrupt import Unwinding\n"
        f"with Unwinding():\n    {lines}\n"
    )
    assert (done.returncode, done.stderr) == (129, "kvrt: interrupted by SIGHUP\n")


def raising(number, when):
    """`Reading._steps` with a signal between two steps, once `when` tokens were read."""
    steps = generation.Reading._steps

    def run(self, runtime, interrupt, show):
        def shown(n):
            show(n)
            if n == when:
                signal.raise_signal(number)

        steps(self, runtime, interrupt, shown)

    return run


@pytest.mark.slow
def test_what_was_read_before_a_signal_is_kept(go, ids, tmp_path, monkeypatch):
    path = tmp_path / "a.kv"
    read = ["--tokens", ids(50), "--n_ubatch", 16, "-n", 2, "--json"]
    with monkeypatch.context() as patch:
        patch.setattr(generation.Reading, "_steps", raising(signal.SIGTERM, 32))
        done = go(*read, "--session", path, prompt=False)
    assert done.code == 143 and json.loads(done.out)["finish_reason"] == "interrupted"
    assert session.read_manifest(path).n_tokens == {0: 32}
    found = json.loads(go(*read, "--session", path, prompt=False).out)
    assert (found["n_restored"], found["n_recomputed"]) == (32, 18)
    assert found["tokens"] == json.loads(go(*read, prompt=False).out)["tokens"]


@pytest.mark.parametrize("closed", [False, True])
def test_an_answer_is_kept_when_its_terminal_is_closed(go, tmp_path, monkeypatch, closed):
    path, real, n = tmp_path / "a.kv", generation.output.write_generated, []

    def write(text):
        n.append(text)
        if len(n) == 5:
            signal.raise_signal(signal.SIGHUP)
        if closed and len(n) >= 5:
            raise generation.output.OutputError("standard output: input/output error")
        real(text)

    monkeypatch.setattr(generation.output, "write_generated", write)
    done = go("--session", path, "--session_all")
    assert done.code == 129, done.err
    assert ("input/output error" in done.err) == closed
    assert ("interrupted" in done.err) != closed
    assert 5 <= session.read_manifest(path).draws[0].n_drawn <= 8


def stopped(*_):
    raise BadLogits("stopped here")


@pytest.fixture
def killed(monkeypatch):
    """A prompt is saved after each step, and the run ends before it is saved as a whole."""
    often = functools.partial(kept_session.KeptSession, every_s=0.0)
    monkeypatch.setattr(run_command, "KeptSession", often)
    monkeypatch.setattr(kept_session.KeptSession, "after_prompt", stopped)


@pytest.mark.slow
def test_a_prompt_is_saved_while_it_is_read(go, ids, tmp_path, killed):
    path, read = tmp_path / "a.kv", ids(64)
    done = go("--tokens", read, "--n_ubatch", 16, "--session", path, "-n", 1, prompt=False)
    assert done.code == 1 and "stopped here" in done.err
    held = ids_of(path)
    assert held == [i % 200 for i in range(len(held))] and len(held) in (16, 32, 48)


@pytest.mark.slow
def test_a_part_of_an_edited_prompt_leaves_the_former_session(
    go, kvrt, tiny, ids, tmp_path, killed
):
    path, old, new = (
        tmp_path / "a.kv",
        list(range(60)),
        [*range(20), *range(100, 140), *range(20, 60)],
    )
    size = ["-c", 128, "--n_ubatch", 16]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_session.KeptSession, "after_prompt", AFTER_PROMPT)
        assert go(*size, "--tokens", ids(old), "--session", path, "-n", 0, prompt=False).code == 0
    done = kvrt("prefill", "-m", tiny, *size, "--tokens", ids(new), "-o", path)
    assert done.code == 1 and "stopped here" in done.err
    held = ids_of(path)
    assert held == new[: len(held)] and 20 < len(held) < len(new)
    assert ids_of(f"{path}~") == old


@pytest.mark.slow
def test_a_part_of_an_appended_prompt_is_not_saved(go, prefilled, ids, killed):
    kept = prefilled.read_bytes()
    words = ["--session", prefilled, "--append", "--tokens", ids(30), "--n_ubatch", 8]
    done = go(*words, prompt=False)
    assert done.code == 1 and prefilled.read_bytes() == kept

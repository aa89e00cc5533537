"""Where no cache folder can be made, everything works and each start pays for it; and says so."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kvrt_models import hub


@pytest.fixture(params=["KVRT_CACHE", "HOME"])
def nowhere(request, kvrt, monkeypatch, tmp_path):
    """A folder of the name in the environment that nobody can make, not even root."""
    taken = tmp_path / "file"
    taken.write_text("")
    for name in ("KVRT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, str(taken / "cache"))
    monkeypatch.setattr(hub.Path, "home", lambda: taken / "home")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield taken
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_doctor_says_what_is_not_kept(kvrt, nowhere):
    done = kvrt("doctor")
    assert done.code == 0
    (line,) = done.err.splitlines()
    assert "compiled programs are not kept (no cache folder: " in line and "KVRT_CACHE" in line
    rows = dict(line.split(maxsplit=1) for line in done.out.decode().splitlines())
    assert rows["programs"] == rows["weights"] == "not kept"
    assert rows["attention"] == "chunked: no kernel for cpu"


@pytest.mark.slow
def test_int8_weights_are_made_at_each_start(go, nowhere, monkeypatch, tmp_path):
    first, second = (go("--dtype", "int8", "-n", 6) for _ in range(2))
    for done in (first, second):
        assert done.code == 0, done.err
        told = [line for line in done.err.splitlines() if "weights of eight bits" in line]
        assert len(told) == 1 and "are not kept (no cache folder: " in told[0], done.err
    assert first.out == second.out != b""
    assert nowhere.read_text() == ""
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "cache"))
    kept = go("--dtype", "int8", "-n", 6)
    assert "are not kept" not in kept.err and kept.out == first.out

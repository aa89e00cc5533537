"""A libtpu that is installed where there is no TPU: nothing of it is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrt.cli.process import accelerators
from tests import typechecker

ROOT = Path(__file__).parents[2]
LIBTPU = """
import sys, time
print("libtpu was imported", file=sys.stderr)

def get_library_path():
    print("libtpu was loaded", file=sys.stderr)
    return "/nowhere/libtpu.so"
"""
KVRT = "import sys; from kvrt.cli.main import run; run()"
PLAIN = "import jax; jax.devices()"


@pytest.fixture
def start(tmp_path, tiny):
    """A process that finds a libtpu; what it says on standard error."""
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text(LIBTPU)

    def run(program, *words, **env):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TPU_"))}
        kept |= {"PYTHONPATH": str(tmp_path), "KVRT_CACHE": str(tmp_path / "cache")} | env
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=kept)
        return done.returncode, done.stderr

    return run


@pytest.mark.slow
def test_an_idle_libtpu_is_left_alone(start, tiny):
    assert start(KVRT, "fit", "-m", str(tiny), "-c", "64") == (0, "")


@pytest.mark.slow
def test_without_kvrt_it_is_loaded(start):
    """What the test above would see, had kvrt not hidden it."""
    assert "libtpu was loaded" in start(PLAIN)[1]


@pytest.mark.slow
def test_platforms_that_are_named_win(start, tiny):
    words = ("fit", "-m", str(tiny), "-c", "64")
    code, said = start(KVRT, *words, JAX_PLATFORMS="tpu,cpu")
    assert code != 0 and "libtpu was loaded" in said
    assert start(KVRT, *words, JAX_PLATFORMS="cpu")[0] == 0


@pytest.mark.parametrize(
    ("vendor", "kind", "found"),
    [
        ("0x1ae0", "0x120000", True),
        ("0x1ae0", "0x020000", False),  # the network card of a virtual machine
        ("0x1ae0", "0x010802", False),  # its disk
        ("0x10de", "0x030200", False),
        (None, None, False),
    ],
)
def test_a_tpu_is_known_by_its_vendor_and_class(tmp_path, vendor, kind, found):
    device = tmp_path / "pci" / "0000:00:04.0"
    device.mkdir(parents=True)
    if vendor:
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (tmp_path / "dev" / "accel").mkdir(parents=True)  # of other accelerators
    assert accelerators.has_tpu(tmp_path / "dev", tmp_path / "pci") == found


def test_a_tpu_is_known_by_its_device(tmp_path):
    (tmp_path / "accel0").touch()
    assert accelerators.has_tpu(tmp_path, tmp_path / "none")


@pytest.mark.parametrize("name", ["JAX_PLATFORMS", "TPU_LIBRARY_PATH"])
def test_who_names_a_device_decides(monkeypatch, name):
    monkeypatch.setattr(accelerators, "has_tpu", lambda: False)
    monkeypatch.setenv(name, "")
    assert left_out(monkeypatch) == {}


def test_a_machine_with_a_tpu_keeps_it(monkeypatch):
    monkeypatch.setattr(accelerators, "has_tpu", lambda: True)
    for name in ("JAX_PLATFORMS", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert left_out(monkeypatch) == {}


def left_out(monkeypatch):
    """Modules that are there afterwards, of none; a check of annotations would import some."""
    modules = {}
    with typechecker.switched_off(), monkeypatch.context() as patch:
        patch.setattr(sys, "modules", modules)
        accelerators.leave_out_libtpu()
    return modules

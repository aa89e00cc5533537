"""kvrt installs as an editable, a wheel and an sdist, and a stranger's `models` hides nothing."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.marks import full

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

# Run where a package `models` lies that is not ours; prints where each of ours comes from.
IMPORT = """
import kvrt, kvrt_models.load, kvrt_models.tokenizer.encode, models
assert models.WHOSE == "a stranger's"
print(kvrt.__file__)
print(kvrt_models.__file__)
"""


def run(*command, cwd):
    # An interpreter's own folders only: no PYTHONPATH of whoever runs the tests.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=kept, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def built(kind: str, folder: Path) -> Path:
    """A wheel or an sdist of this tree."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=ROOT)
    (path,) = folder.iterdir()
    return path


def environment(folder: Path) -> Path:
    """An empty environment that sees the dependencies of this one; its interpreter."""
    venv.create(folder, symlinks=os.name != "nt")
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", paths))
    # After the environment's own, and without running the .pth files that lie there.
    theirs = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (own / "dependencies.pth").write_text("\n".join(theirs) + "\n")
    return scripts / "python"


# A wheel made of the sdist has the files of one made here.
@pytest.mark.parametrize("kind", ["editable", full("wheel"), "sdist"])
def test_an_installed_kvrt_is_found_beside_a_strangers_models(tmp_path, kind):
    python = environment(tmp_path / "venv")
    what = ["-e", ROOT] if kind == "editable" else [built(kind, tmp_path / "dist")]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", *offline]
    run(*pip, *what, cwd=tmp_path)

    (tmp_path / "work" / "models").mkdir(parents=True)
    (tmp_path / "work" / "models" / "__init__.py").write_text('WHOSE = "a stranger\'s"\n')
    found = run(python, "-c", IMPORT, cwd=tmp_path / "work").split()
    at = [ROOT / "kvrt", ROOT / "models" / "kvrt_models"]
    if kind != "editable":
        site = Path(found[0]).parents[1]
        assert site.is_relative_to(tmp_path / "venv")
        at = [site / "kvrt", site / "kvrt_models"]
        assert not (site / "models").exists()
    assert [Path(p).parent for p in found] == at
    for package in at:
        assert (package / "py.typed").exists()
    helped = run(python.with_name("kvrt"), "--help", cwd=tmp_path / "work")
    assert helped == run(python, "-m", "kvrt", "--help", cwd=tmp_path / "work")
    assert "usage: kvrt" in helped.lower()

"""What only some systems have is not needed to import kvrt, nor to lock."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Ours find no such modules; others guard themselves.
WITHOUT = """
import builtins, sys
MISSING = {"fcntl", "resource", "termios", "pwd", "grp", "tty", "pty", "curses", "readline"}
real = builtins.__import__

def without(name, globals=None, locals=None, fromlist=(), level=0):
    asker = (globals or {}).get("__name__") or ""
    ours = asker.split(".")[0] in ("kvrt", "kvrt_models", "__main__")
    if level == 0 and name in MISSING and ours:
        raise ImportError(f"no module {name}, wanted by {asker}")
    return real(name, globals, locals, fromlist, level)

builtins.__import__ = without
"""

EVERY = """
import importlib, pkgutil
import kvrt, kvrt_models
n = 0
for package in (kvrt, kvrt_models):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            n += 1
print(n)
"""


def python(code, *args):
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT + code, *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )


@pytest.mark.slow
def test_every_module_can_be_imported_without_those_of_posix():
    done = python(EVERY)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_the_list_of_missing_modules_is_heeded():
    done = python("import fcntl")
    assert done.returncode == 1 and "no module fcntl" in done.stderr


# A process that holds a lock until it is killed, or its input ends.
HOLD = """
import sys
from importlib import util
from pathlib import Path
path, what = Path(sys.argv[1]), sys.argv[2]
# The module alone, without the seconds of JAX.
spec = util.spec_from_file_location("kvrt.alone", "kvrt/files/locks.py")
locks = util.module_from_spec(spec)
spec.loader.exec_module(locks)
if what == "file":
    with open(path, "ab") as file:
        unlock = locks.lock_file(file.fileno(), path)
        print(unlock is not None, flush=True)
        sys.stdin.read()
else:
    try:
        with locks.locked_folder(path, "index", shared=what == "shared", timeout_s=0.2):
            print(True, flush=True)
            sys.stdin.read()
    except TimeoutError:
        print(False, flush=True)
"""


@pytest.fixture
def hold(tmp_path):
    """Starts a process that wants a lock; whether it has it."""
    started = []

    def start(path, what, without):
        code = (WITHOUT if without else "") + HOLD
        command = [sys.executable, "-c", code, path, what]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        started.append(child)
        assert child.stdout is not None
        return child.stdout.readline() == "True\n"

    start.children = started
    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("without", [False, True])
def test_readers_read_together_and_a_writer_alone(tmp_path, hold, without):
    assert hold(tmp_path, "shared", without)
    assert hold(tmp_path, "shared", without)
    assert not hold(tmp_path, "alone", without)
    for child in hold.children[:2]:
        # Whoever dies gives it back.
        child.kill()
        child.wait()
    assert hold(tmp_path, "alone", without)
    assert not hold(tmp_path, "shared", without)
    hold.children[3].kill()
    hold.children[3].wait()
    assert hold(tmp_path, "shared", without)


@pytest.mark.parametrize("without", [False, True])
def test_a_file_has_one_holder(tmp_path, hold, without):
    path = tmp_path / "out"
    assert hold(path, "file", without)
    assert not hold(path, "file", without)
    hold.children[0].kill()
    hold.children[0].wait()
    assert hold(path, "file", without)

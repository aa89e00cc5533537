"""Verdicts of self-tests: those of this process, and files beside JAX's compiled programs.

A file is that of `kvrt.files.kept`: its key is all that the verdict depends on, its value `passed`
and `why`. Beside it lies a mark while its test runs, and after a test that ended its process.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kvrt.attention.choice.cases import Case
from kvrt.attention.choice.self_test import Verdict, run_test
from kvrt.files import locks
from kvrt.files.class_source import python_digest
from kvrt.files.kept import keep, kept_path, read_kept

# What kernels, and XLA's attention beside them, are made of.
_SOURCES = ("attention", "cells", "store")
# What compilers of accelerators are told beside their programs.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_DRIVERS = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")

Test = Callable[[Case, str], Verdict]


class Verdicts:
    """Verdicts that were given already; a test runs for those that were not.

    Args:
      test: gives a verdict on a kernel.
    """

    def __init__(self, test: Test = run_test):
        """There are none yet."""
        self._test = test
        self._held: dict[str, Verdict] = {}

    def of(self, case: Case, kernel: str) -> Verdict:
        """The verdict on a kernel in a case: of this process, of a file, or of a test now."""
        key = {**environment(), "kernel": kernel, "case": _plain(case)}
        folder = folder_of_verdicts()
        path = kept_path(folder or Path(), kernel, key)
        name = path.name
        if name in self._held:
            return self._held[name]
        path = path if folder else None
        found = path and read_kept(path, key, _parsed, "the kernel's self-test runs")
        if found is None:
            found = self._tested(case, kernel, path)
            if path and found.lasting:
                keep(path, key, {"passed": found.passed, "why": found.why})
        if found.lasting:
            self._held[name] = found
        return found

    def _tested(self, case: Case, kernel: str, path: Path | None) -> Verdict:
        """The verdict of a test now, or on a test that ended its process."""
        with _marked(path) as died:
            if died:
                why = f"ended its process in its self-test at {case} (remove {path} to try again)"
                return Verdict(passed=False, why=why)
            return self._test(case, kernel)


def folder_of_verdicts() -> Path | None:
    """Where verdicts are kept: in the folder of JAX's compiled programs, if it is on this machine.

    None where JAX keeps no programs: a verdict holds as long as the process then.
    """
    programs = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return None if not programs or "://" in programs else Path(programs) / "kvrt_self_tests"


def environment() -> dict[str, str]:
    """What a verdict depends on beside kernel and case: device, driver, versions, our sources."""
    (device,) = jnp.zeros(()).devices()  # where a test runs
    return {**machine(device), "sources": _sources()}


def machine(device: Any) -> dict[str, str]:
    """The kind of a device, its driver, versions of JAX and flags of its compiler."""
    return {
        "device": device.device_kind,
        "platform": f"{device.platform} {device.client.platform_version}",
        "driver": _driver(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "flags": " ".join(f"{x}={os.environ[x]}" for x in _FLAGS if x in os.environ),
    }


def _driver() -> str:
    """The version of a GPU's kernel module, "" where the system has none or does not say."""
    for path in map(Path, _DRIVERS):
        with contextlib.suppress(OSError):
            return path.read_text().strip()
    return ""


@functools.cache
def _sources() -> str:
    """A digest of the files that attention is made of."""
    root = Path(__file__).parents[2]
    return python_digest([root / room for room in _SOURCES])


def _plain(case: Case) -> dict[str, Any]:
    """A case as JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(case)))


def _parsed(value: Any) -> Verdict:
    """A verdict as a file has it."""
    if not isinstance(value["passed"], bool):
        raise TypeError("no verdict")
    return Verdict(passed=value["passed"], why=str(value["why"]), kept=True)


@contextlib.contextmanager
def _marked(path: Path | None) -> Iterator[bool]:
    """Whether a process died in the test of this verdict; marks that one is in it now.

    A kernel that is wrong may end its process, at every start. The mark stays then, and the lock
    on it does not; an exception takes both away.
    """
    with contextlib.ExitStack() as held:
        mark = _own_mark(path, held) if path else None
        if mark is None:
            yield False
            return
        died = os.fstat(mark).st_size > 0
        os.write(mark, b"in its self-test")
        os.fsync(mark)
        yield died


def _own_mark(path: Path, held: contextlib.ExitStack) -> int | None:
    """The mark of a verdict, locked; None where another process has it or the system refuses."""
    mark = path.with_suffix(".running")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = os.open(mark, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        unlock = locks.lock_file(file, mark)
    except OSError:
        unlock = None
    if unlock is None:
        os.close(file)
        return None

    def remove() -> None:
        # Emptied as well: another process may have opened it, and Windows removes no open file.
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            mark.unlink()
        os.close(file)
        unlock()

    held.callback(remove)
    return file

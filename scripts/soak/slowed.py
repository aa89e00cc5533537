"""A command of kvrt that takes its time and logs what it has done, for `scripts.soak.kills`.

    python -m scripts.soak.slowed LOG run -p "Once upon a time"

A line of the log is a time, what was done, and how much of it is done by then.
"""

import functools
import os
import signal
import sys
import time

from kvrt.cli.process import interrupt

EVERY_S = 0.5  # between two saves, in place of 45
_STEP_S = 0.01


class Log:
    """A file of lines that are there as soon as they are written."""

    def __init__(self, path: str) -> None:
        """Says that signals are heard."""
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.add("start", 0)

    def add(self, what: str, n: int) -> None:
        """Adds a line, and waits a little."""
        os.write(self._fd, f"{time.time()} {what} {n}\n".encode())
        time.sleep(_STEP_S)


def main() -> None:
    """Runs the command as `kvrt.__main__` does, with signals as a shell leaves them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    interrupt.end_at_once()
    log = Log(sys.argv[1])
    sys.argv[1:] = sys.argv[2:]
    _watch_runs(log)
    _watch_batches(log)
    from kvrt.cli import main

    main.run()


def _watch_runs(log: Log) -> None:
    from kvrt.cli.run import generation, kept_session, run_command

    often = functools.partial(kept_session.KeptSession, every_s=EVERY_S)
    run_command.KeptSession = often
    steps, take = generation.Reading._steps, generation.Generation._take

    def logged_steps(self, runtime, interrupt, show):
        def shown(n_done):
            log.add("read", len(self.read))
            show(n_done)

        steps(self, runtime, interrupt, shown)

    def logged_take(self, token, stream):
        take(self, token, stream)
        log.add("sampled", self.draw.n_drawn)

    generation.Reading._steps, generation.Generation._take = logged_steps, logged_take


def _watch_batches(log: Log) -> None:
    from kvrt.cli.batch import server

    step = server.Server.step

    def logged(self):
        step(self)
        log.add("done", self.counts.n_done)

    server.Server.step = logged


if __name__ == "__main__":
    main()

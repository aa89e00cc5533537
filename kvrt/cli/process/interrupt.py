"""Ctrl-C as a request: the first is asked about between steps, the second ends the process.

An exception in the middle of a dispatch would lose the donated cache, and with it the summary.
"""

import os
import signal
import socket
import sys
import threading
from types import FrameType

EXIT_CODE = 130
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(Exception):
    """Raised between two steps of a prefill after Ctrl-C."""


class Interrupt:
    """A context in which Ctrl-C only sets `asked`.

    Python runs signal handlers between two instructions of its own, so not while a program
    compiles; hence the thread, which hears of a signal at once.
    """

    def __init__(self) -> None:
        """Nothing has been asked."""
        self.asked = False

    def __enter__(self) -> "Interrupt":
        """Takes over SIGINT; the main thread only."""
        self._hear, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        self._handler = signal.signal(signal.SIGINT, self._between)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Gives SIGINT back."""
        signal.signal(signal.SIGINT, self._handler)
        signal.set_wakeup_fd(self._fd)
        self._tell.close()
        self._thread.join()
        self._hear.close()

    def check(self) -> None:
        """Raises Interrupted after Ctrl-C."""
        if self.asked:
            raise Interrupted

    def _between(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _listen(self) -> None:
        seen = 0
        while signals := self._hear.recv(16):
            seen += signals.count(signal.SIGINT)
            self.asked = self.asked or seen > 0
            if seen > 1:
                if sys.stderr.isatty():
                    # A progress bar may have hidden it.
                    os.write(2, _SHOW_CURSOR.encode())
                os._exit(EXIT_CODE)

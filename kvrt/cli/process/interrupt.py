"""SIGINT, SIGTERM and SIGHUP: how each stage of a command ends on them.

From the first line until JAX is imported they end the process at once (`end_at_once`). While a
command opens or writes files they raise (`Unwinding`). While tokens are computed they are a request
that is looked at between two steps (`Interrupt`): an exception in the middle of a dispatch would
lose the donated cache. A second signal ends the process at once. The exit code is 128 and the
signal's number: 130, 143 or 129.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType

from kvrt.errors import KvrtError

_NUMBERS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
_UNWIND_S = 2.0  # native code may hold the main thread, and libraries swallow exceptions
# On a terminal: the line of a progress bar goes, and the cursor that it has hidden comes back.
_RESTORE = "\r\x1b[2K\x1b[?25h"


class Ended(KeyboardInterrupt):
    """A signal has ended the command."""

    def __init__(self, number: int, message: str = ""):
        """Takes the signal, and an error in its course, which is shown in place of its name."""
        super().__init__(message or _line(number))
        self.exit_code = 128 + number


class Interrupted(Exception):
    """Raised between two steps of a prefill after a signal."""


def end_at_once() -> None:
    """Makes each signal end the process, with one line; for the time in which JAX is imported.

    Nothing is computed yet and no file begun. An exception would be swallowed or rewritten by
    modules in the middle of their import.
    """
    for number in _heard():
        signal.signal(number, lambda number, frame: _leave(number, _line(number)))


class _Signals:
    """A context with handlers of its own, and a thread that ends the process on a second signal.

    Python runs handlers between two instructions of its own, so not while a program compiles;
    hence the thread, which hears of a signal at once.
    """

    def __init__(self) -> None:
        """No signal has come."""
        self._number: int | None = None
        self._limit_s: float | None = None  # from the first signal until the process is ended

    def __enter__(self):
        """Takes over the signals that are not ignored; the main thread only."""
        self._hear, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        self._handlers = {n: signal.signal(n, self._between) for n in _heard()}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the signals back.

        Raises:
          Ended: there was a signal, and then an exception that it may have caused.
        """
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        self._tell.close()
        self._thread.join()
        self._hear.close()
        self._closed(error)

    def _closed(self, error: BaseException | None) -> None:
        """What follows once the signals are given back; may raise Ended."""

    def _between(self, number: int, frame: FrameType | None) -> None:
        self._number = number

    def _listen(self) -> None:
        n_seen = 0
        try:
            while numbers := self._hear.recv(16):
                for number in filter(_NUMBERS.__contains__, numbers):
                    self._number = number
                    n_seen += 1
                    if n_seen > 1:
                        _leave(number)
                    self._hear.settimeout(self._limit_s)
        except TimeoutError:
            assert self._number is not None
            _leave(self._number, _line(self._number))


class Unwinding(_Signals):
    """A context in which a signal raises `Ended`, so that temporary files are removed."""

    def __init__(self) -> None:
        """No signal has come."""
        super().__init__()
        self._limit_s = _UNWIND_S

    def __enter__(self):
        """Takes over the signals, and what is raised where Python can raise nothing."""
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._swallowed
        return super().__enter__()

    def _closed(self, error: BaseException | None) -> None:
        """Raises `Ended` again where a library has turned it into another exception."""
        sys.unraisablehook = self._unraisable
        if self._number is not None and isinstance(error, Exception):
            raise Ended(self._number) from error

    def _between(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        raise Ended(number)

    def _swallowed(self, found: "sys.UnraisableHookArgs") -> None:
        """Ends the process if `Ended` was raised in a finalizer or a collector's callback."""
        if isinstance(found.exc_value, Ended):
            _leave(found.exc_value.exit_code - 128, str(found.exc_value))
        self._unraisable(found)


class Interrupt(_Signals):
    """A context in which a signal only sets `asked`; what is to be kept is saved inside it."""

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a command that was asked to end; 130 where another process was."""
        return 128 + (self._number or signal.SIGINT)

    def check(self) -> None:
        """Raises Interrupted after a signal."""
        if self.asked:
            raise Interrupted

    def _closed(self, error: BaseException | None) -> None:
        """An error after a signal, of a closed terminal for example, is `Ended`."""
        if self._number is not None and isinstance(error, KvrtError | OSError):
            raise Ended(self._number, str(error)) from error


def _heard() -> list[int]:
    """The signals that end a command; one that the parent ignores, as nohup does, stays so."""
    return [n for n in dict.fromkeys(_NUMBERS) if signal.getsignal(n) is not signal.SIG_IGN]


def _line(number: int) -> str:
    return f"interrupted by {signal.Signals(number).name}"


def _leave(number: int, line: str = "") -> None:
    """Ends the process without waiting for threads or unwinding the main one."""
    text = f"kvrt: {line}\n" if line else ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = _RESTORE + text if sys.stderr.isatty() else text
        os.write(2, text.encode())
    os._exit(128 + number)

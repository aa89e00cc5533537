"""Processes that measure, both ends of their pipes: one may hang or die, and the run continues.

A message is a JSON line with what to do ("do"), and so is its answer: {"ok": ...}, or {"failed":
reason} with "room" true where only memory was lacking. What a library prints goes to the log.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

# What is started finds the scripts there, wherever it is started from.
_ROOT = Path(__file__).resolve().parents[2]
# Until a process that nobody asks any more is killed.
_END_S = 3.0
_NO_ROOM = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory", "no room", "GiB of")


class Failed(Exception):
    """A worker did not do what it was asked; `room` where memory alone was lacking."""

    def __init__(self, reason: str, *, room: bool = False, alive: bool = True):
        """One line; `alive` where the worker can go on."""
        super().__init__(reason)
        self.room, self.alive = room, alive


class Worker:
    """The asking end: a process that is started when it is first asked, and again after it died."""

    def __init__(self, module: str, log: Path, env: Mapping[str, str], hello: Mapping[str, Any]):
        """Starts nothing yet; `hello` is said first to every process."""
        self._command = [sys.executable, "-m", module]
        self._log, self._env, self._hello = log, dict(env), dict(hello)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread()
        self.machine: dict[str, Any] = {}

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    def start(self, timeout_s: float) -> None:
        """Starts the process where there is none, and keeps what it says of its machine.

        Raises:
          Failed: it does not come up.
        """
        if self._process is not None:
            return
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path, **self._env},
            )
        self._answers = queue.SimpleQueue()
        assert self._process.stdout is not None
        args = (self._process.stdout, self._answers)
        self._reader = threading.Thread(target=_collect, args=args, daemon=True)
        self._reader.start()
        self.machine = self._ask(self._hello, timeout_s)

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        """The answer to a message.

        Raises:
          Failed: it could not, did not in time, or died; the last two end the process.
        """
        self.start(timeout_s)
        return self._ask(message, timeout_s)

    def _ask(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=max(timeout_s, 0.1))
        except queue.Empty:
            self.stop()
            raise Failed(f"no answer within {timeout_s:.0f} s", alive=False) from None
        except BrokenPipeError:
            answer = None
        if answer is None:
            process = self._process
            self.stop()
            code = process.returncode
            raise Failed(f"its process died with {code}; see {self._log.name}", alive=False)
        if "failed" in answer:
            raise Failed(answer["failed"], room=answer["room"])
        return answer["ok"]

    def stop(self) -> None:
        """Ends the process, with all the memory that it holds."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            process.stdin.close()  # it ends of itself, unless it hangs
            process.wait(_END_S)
        process.kill()
        process.wait()
        self._reader.join(_END_S)


def _collect(lines: IO[str], answers: queue.SimpleQueue) -> None:
    with lines:
        for line in lines:
            answers.put(json.loads(line))
    answers.put(None)


def serve(handlers: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
    """The answering end: runs until nobody asks any more, and no longer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        message = asked.get()
        try:
            answer = {"ok": handlers[message["do"]](message)}
        # Whatever a compiler, a driver or a library says is this side's result.
        except Exception as error:
            reason = one_line(error)
            answer = {"failed": reason, "room": any(x in reason for x in _NO_ROOM)}
        answers.write(json.dumps(answer) + "\n")


def _listen(asked: queue.SimpleQueue) -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    # Whoever asked is gone: a kernel that still runs must not take the next run's time.
    os._exit(0)


def one_line(error: Exception, most: int = 200) -> str:
    """An error to be read in a table."""
    text = " ".join(str(error).replace("|", "/").split()) or "no message"
    return f"{type(error).__name__}: {text}"[:most]

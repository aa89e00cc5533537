"""Runs a tokenizer.json in a process of its own, within limits on memory and time.

For files with components that could take for ever, or all memory, on some text: regular
expressions, normalisers that grow, post-processors of millions of tokens. Such a library call
cannot be interrupted, and lack of memory aborts its process.
"""

import contextlib
import dataclasses
import json
import subprocess
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from kvrt.errors import BadModelFile, UsageError
from kvrt_models import bounded
from kvrt_models.tokenizer.library import ENCODE, LOAD

MAX_REPLY_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """What the process may take.

    Attributes:
      memory_bytes: addresses it may map; its working set is well below.
      cpu_s: processor seconds of a request, beside those for each character.
      load_char_cpu_s: for each character of a tokenizer.json; about 1e-7 are usual.
      encode_char_cpu_s: for each character of a text; about 1e-6 are usual.
    """

    memory_bytes: int = 2 << 30
    cpu_s: float = 5.0
    load_char_cpu_s: float = 5e-7
    encode_char_cpu_s: float = 1e-5


class TokenizerProcess:
    """A tokenizer like `LibraryTokenizer`, in another process; one caller at a time."""

    def __init__(self, rules: str, limits: ProcessLimits) -> None:
        """Starts the process and builds the tokenizer there.

        Args:
          rules: content of a tokenizer.json.
          limits: on the process.

        Raises:
          BadModelFile: the library refuses the file, or it needs more than the limits.
        """
        self._given = rules
        self._limits = limits
        answer = self._start()
        self.rules: str = answer["rules"]
        self.added = [(i, text, special) for i, text, special in answer["added"]]

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text.

        Raises:
          UsageError: the library cannot encode it, or needs more than the limits for it.
        """
        if self._process.poll() is not None:
            self._start()  # The text before this one was too much; this one need not be.
        options = {"add_special": add_special, "parse_special": parse_special}
        cpu_s = self._limits.cpu_s + self._limits.encode_char_cpu_s * len(text)
        try:
            return self._ask({"what": ENCODE, "text": text, **options}, cpu_s)["ids"]
        except _Failed as error:
            raise UsageError(
                f"tokenizer.json cannot encode a text of {len(text)} characters: {error}; use a "
                f"GGUF file of the model"
            ) from error

    def _start(self) -> dict[str, Any]:
        limits = self._limits
        cpu_s = limits.cpu_s + limits.load_char_cpu_s * len(self._given)
        self._process = subprocess.Popen(
            bounded.limited_command(
                "tokenizer/library.py", memory_bytes=limits.memory_bytes, cpu_s=cpu_s
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Panics and allocations that fail write there; the answer, or its lack, says it.
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _stop, self._process)
        try:
            return self._ask({"what": LOAD, "text": self._given}, cpu_s)
        except _Failed as error:
            _stop(self._process)
            raise BadModelFile(f"refused by the tokenizers library: {error}") from error

    def _ask(self, request: dict[str, Any], cpu_s: float) -> dict[str, Any]:
        """The answer to a request; ends the process where none comes in time."""
        sent = json.dumps({**request, "cpu_s": cpu_s}).encode() + b"\n"
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        # Waiting for a processor is no fault of the file, and where there is no timer of processor
        # time this one is all there is.
        with _killed_after(self._process, 10 + 4 * cpu_s):
            try:
                pipe_in.write(sent)
                pipe_in.flush()
                line = pipe_out.readline(MAX_REPLY_BYTES)
            except OSError:  # It has ended before it read everything.
                line = b""
        if not line.endswith(b"\n"):
            _stop(self._process)
            raise _Failed(
                f"it needs more than {cpu_s:.1f} s of processor time or "
                f"{self._limits.memory_bytes >> 20:,} MiB of memory"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise _Failed(answer["error"])
        return answer


class _Failed(Exception):
    """No answer, and why."""


@contextlib.contextmanager
def _killed_after(process: "subprocess.Popen[bytes]", wall_s: float) -> Iterator[None]:
    timer = threading.Timer(wall_s, process.kill)
    timer.start()
    try:
        yield
    except BaseException:
        # An answer that was not waited for would be taken for that to the next request.
        process.kill()
        raise
    finally:
        timer.cancel()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # Bytes that could not be written any more.
            pipe.close()

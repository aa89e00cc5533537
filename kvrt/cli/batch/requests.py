"""The requests of `kvrt batch`: one JSON object a line, each checked by itself.

A first pass checks every line and remembers where it lies; a prompt is read again when it is
served, so that a file of any length costs little memory. A line that is no request is reported by
its number and fails alone.
"""

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from kvrt.cli.batch.request_line import MAX_LINE_BYTES, Asked, Id, Parser, Wrong
from kvrt.cli.flags.serving import BatchOptions
from kvrt.errors import UsageError, reason

MAX_LINES = 1 << 24
_STDIN = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RequestEntry:
    """Where a request lies, and what is needed of it before it is read."""

    line: int
    offset: int
    n_bytes: int
    id: Id
    n: int
    priority: int
    digest: str = ""
    has_chunks: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that is no request: its number, its id if it has one, and why."""

    line: int
    id: Id | None
    error: str


class Requests:
    """The requests of a file.

    Attributes:
      name: of the file, for messages.
      entries: those that are well formed, in their order.
      bad: lines that are none.
    """

    def __init__(
        self,
        path: str,
        options: BatchOptions,
        digest: Callable[[Asked], str] = lambda asked: "",
    ):
        """Checks all lines of a file, - for standard input.

        Args:
          path: of the file.
          options: the command's flags, for what a line leaves out.
          digest: of what a request's results depend on.

        Raises:
          UsageError: it cannot be read, or none of its lines is a request.
        """
        self.name = "standard input" if path == "-" else path
        self._parser, self._digest = Parser(options), digest
        self.entries: list[RequestEntry] = []
        self.bad: list[BadLine] = []
        self._file = self._open(path)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def read(self, entry: RequestEntry) -> Asked:
        """A request.

        Raises:
          UsageError: the file was changed since its lines were checked.
        """
        try:
            self._file.seek(entry.offset)
            asked = self._parser.parse(self._file.read(entry.n_bytes))
        except (OSError, Wrong) as error:
            raise self._changed(entry) from error
        if (asked.id, asked.n) != (entry.id, entry.n):
            raise self._changed(entry)
        return asked

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _check(self) -> None:
        first: dict[str, int] = {}
        for line, offset, data in self._lines():
            try:
                asked = self._parser.parse(data)
                # 1 and "1" would be one name where people read them.
                name = str(asked.id)
                if name in first:
                    taken = f"its id is that of line {first[name]}; give it one of its own"
                    raise Wrong(taken, asked.id)
                digest = self._digest(asked)
            except Wrong as error:
                self.bad.append(BadLine(line=line, id=error.id, error=f"line {line}: {error}"))
                continue
            first[name] = line
            size = len(data or b"")
            sizes = {"line": line, "offset": offset, "n_bytes": size}
            named = {"id": asked.id, "n": asked.n, "priority": asked.priority}
            more = {"digest": digest, "has_chunks": bool(asked.chunks)}
            self.entries.append(RequestEntry(**sizes, **named, **more))
        if not self.entries:
            found = self.bad[0].error if self.bad else "it is empty"
            raise UsageError(
                f"-i {self.name}: holds no request: {found}; give a JSON object a line, like "
                '{"id": "a", "prompt": "Once"}'
            )

    def _open(self, path: str) -> BinaryIO:
        try:
            given = open(_STDIN if path == "-" else path, "rb", closefd=path != "-")
            if path != "-" and given.seekable():
                return given
            # It can be read once only, and is needed twice.
            with given, tempfile.TemporaryFile() as file:
                shutil.copyfileobj(given, file)
                return os.fdopen(os.dup(file.fileno()), "rb")
        except OSError as error:
            raise UsageError(
                f"-i {self.name}: {reason(error)}; give a file that can be read, or -"
            ) from error

    def _lines(self) -> Iterator[tuple[int, int, bytes | None]]:
        """Number, offset and bytes of each line that is not blank; None for one too long."""
        self._file.seek(0)
        offset = 0
        for line in range(1, MAX_LINES + 1):
            part = data = self._file.readline(MAX_LINE_BYTES + 1)
            size = len(data)
            while size > MAX_LINE_BYTES and part and not part.endswith(b"\n"):
                part = self._file.readline(MAX_LINE_BYTES)
                size += len(part)
            if not data:
                return
            if size > MAX_LINE_BYTES:
                yield line, offset, None
            elif data.strip():
                yield line, offset, data
            offset += size
        if self._file.read(1):
            raise UsageError(f"-i {self.name}: more than {MAX_LINES} lines; divide it")

    def _changed(self, entry: RequestEntry) -> UsageError:
        return UsageError(
            f"-i {self.name}: line {entry.line} was changed while the requests were served; run "
            "again with the file as it is to be"
        )

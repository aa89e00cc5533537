"""The results of `kvrt batch`: whole lines of finished requests, so that it can be resumed.

The samples of a request are written together, each line at once, and are on the disk before the
next; whatever ends the process or the machine, only the end of the file can be torn, and it is cut
off before it is resumed.
"""

import contextlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrt.cli.batch.request_line import MAX_LINE_BYTES, Id
from kvrt.cli.batch.stored_results import Expected, settle_results
from kvrt.cli.batch.torn_lines import begins_like_a_line, is_torn_write
from kvrt.cli.process import output
from kvrt.errors import KvrtError, UsageError, reason
from kvrt.files import atomic, locks

_MAX_BYTES = 4 * MAX_LINE_BYTES
_MODE = 0o600  # texts tell what the prompts were

Record = dict[str, Any]


def finished(
    id: Id, tokens: Sequence[int], text: str, reason: str, n_cached: int, *, sample: int | None
) -> Record:
    """A line of the results; `sample` only where there are several."""
    return {
        "id": id,
        **({} if sample is None else {"sample": sample}),
        "tokens": list(tokens),
        "text": text,
        "finish_reason": reason,
        "n_cached": n_cached,
    }


def failed(id: Id | None, error: str, *, line: int | None = None) -> Record:
    """The line of a request that could not be served; with its number where it is none."""
    record = finished(id or "", (), "", "error", 0, sample=None) | {"id": id}
    return record | ({} if line is None else {"line": line}) | {"error": error}


class Results:
    """A file of results, or standard output.

    Attributes:
      done: ids of requests whose lines are all there.
      reported: numbers of lines that were reported as no requests.
      n_failed: requests and lines with an error.
      n_cut: bytes that an interruption had torn.
    """

    def __init__(self, path: str, n_samples: Mapping[Id, int], expected: Expected | None = None):
        """Opens the file and reads what is there; - is standard output.

        Args:
          path: of the file.
          n_samples: the requests that may be in it, and how many lines each has.
          expected: what its results have to be of; None does not look.

        Raises:
          UsageError: it holds something else, or cannot be written.
        """
        self._name, self._n_samples = path, n_samples
        self.done: set[Id] = set()
        self.reported: set[int] = set()
        self.n_failed = self.n_cut = 0
        self._digests = expected.digests if expected else {}
        self._fd = None if path == "-" else self._open(path)
        if self._fd is not None and expected is not None:
            fd = settle_results(path, self._fd, expected, _MAX_BYTES)
            # Where results were taken out, another file stands there.
            self._fd = fd if fd >= 0 else self._open(path)
        self._is_file = self._fd is not None and stat.S_ISREG(os.fstat(self._fd).st_mode)
        if self._fd is not None and self._is_file:
            try:
                self._resume(self._fd)
                # A new file is none before its folder knows it; not every folder can be read.
                with contextlib.suppress(PermissionError):
                    atomic.sync_folder(Path(path).parent)
            except BaseException:
                self.close()
                raise

    def write(self, records: Sequence[Record]) -> None:
        """Adds the lines of one request.

        Raises:
          KvrtError: there is no room; the file can be resumed.
        """
        records = [self._signed(r) for r in records]
        text = "".join(json.dumps(r, allow_nan=False) + "\n" for r in records)
        if self._fd is None:
            output.write_text(text)
        else:
            self._write(self._fd, text.encode())
        self._note(records)

    def close(self) -> None:
        """Closes the file, which lets another process write it."""
        if self._fd is not None and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._unlock()

    def _signed(self, record: Record) -> Record:
        """A line with what its result was computed with."""
        of_request = "line" not in record and record["id"] in self._digests
        return record | ({"digest": self._digests[record["id"]]} if of_request else {})

    def _open(self, path: str) -> int:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, _MODE)
        except OSError as error:
            raise UsageError(f"-o {path}: {reason(error)}; give another name, or -") from error
        try:
            unlock = locks.lock_file(fd, Path(path))
        except OSError as error:
            os.close(fd)
            raise UsageError(f"-o {path}: {reason(error)}; give another name, or -") from error
        if unlock is None:
            os.close(fd)
            raise UsageError(
                f"-o {path}: another kvrt batch is writing it; wait for it, or give another name"
            )
        self._unlock = unlock
        return fd

    def _write(self, fd: int, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(fd, left) :]
            if self._is_file:
                os.fsync(fd)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise KvrtError(
                f"-o {self._name}: {reason(error)}; make room and run again, which resumes it"
            ) from error

    def _resume(self, fd: int) -> None:
        """Takes note of what is there, and cuts off what is torn."""
        end = whole = n_seen = 0
        of = None
        with open(fd, "rb", closefd=False) as file:
            for line, data in enumerate(iter(lambda: file.readline(_MAX_BYTES), b""), 1):
                if b"\0" in data or not data.endswith(b"\n"):
                    self._check_torn(line, data, file.read(_MAX_BYTES), bool(whole))
                    break
                record = self._parse(line, data)
                if n_seen and record["id"] != of:
                    raise self._foreign(line, f"request {_show(of)} before it is not whole")
                of, n_seen, end = record["id"], n_seen + 1, end + len(data)
                if n_seen == self._lines_of(record):
                    self._note([record])
                    n_seen, whole = 0, end
        self.n_cut = os.fstat(fd).st_size - whole
        if self.n_cut:
            os.ftruncate(fd, whole)
            os.fsync(fd)
        os.lseek(fd, whole, os.SEEK_SET)

    def _check_torn(self, line: int, data: bytes, rest: bytes, follows_results: bool) -> None:
        """Refuses an end that no interruption of ours has left."""
        n_lines = max(self._n_samples.values(), default=1)
        if len(rest) < _MAX_BYTES and is_torn_write(
            data + rest, n_lines=n_lines, follows_results=follows_results
        ):
            return
        if len(data) < _MAX_BYTES and begins_like_a_line(data) and b"\0" not in data:
            try:
                record = json.loads(data)
            except (ValueError, RecursionError):
                return
            if "finish_reason" in record:
                return
        raise self._foreign(line, "it is no result")

    def _parse(self, line: int, data: bytes) -> Record:
        try:
            record = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._foreign(line, "it is no JSON") from error
        if not isinstance(record, dict) or not {"id", "finish_reason"} <= set(record):
            raise self._foreign(line, "it is no result")
        name = record["id"]
        if type(record.get("line")) is int and "error" in record:
            return record
        # A JSON true would pass for the integer 1.
        if type(name) not in (str, int) or name not in self._n_samples:
            raise self._foreign(line, f"it is of request {_show(name)}, which -i has not")
        if name in self.done:
            raise self._foreign(line, f"request {_show(name)} is there already")
        return record

    def _lines_of(self, record: Record) -> int:
        """Lines of the request: one a sample, and one alone for an error."""
        return 1 if "error" in record else self._n_samples[record["id"]]

    def _note(self, records: Sequence[Record]) -> None:
        self.n_failed += any("error" in r for r in records)
        if "line" in records[0]:
            self.reported.add(records[0]["line"])
        else:
            self.done.add(records[0]["id"])

    def _foreign(self, line: int, why: str) -> UsageError:
        return UsageError(
            f"-o {self._name}: line {line} is not of these requests: {why}; give another name, or "
            "the -i that belongs to it"
        )


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."

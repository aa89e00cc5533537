"""The results of `kvrt batch`: whole lines of finished requests, so that it can be resumed.

The samples of a request are written together, each line at once, and are on the disk before the
next; whatever ends the process or the machine, only the end of the file can be torn, and it is cut
off before it is resumed.

A result that is there stands if it was computed from the same request, with the same model and
flags. One of a request that was changed since is computed anew; one of another model or of other
flags is refused unless --restart computes it anew as well. What is taken out stays in a copy of the
former file.
"""

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from kvrt.cli.batch.digest import Basis
from kvrt.cli.batch.requests import MAX_LINE_BYTES, Id
from kvrt.cli.process import output
from kvrt.errors import KvrtError, UsageError, reason
from kvrt.files import atomic, locks
from kvrt.files.typed_json import shown_json

if TYPE_CHECKING:
    from kvrt.cli.report.summary import Approximation

BEGIN = b'{"id": '  # of every line of results
_END = b'"n_cached": '  # stands near the end of one
_TEXT = bytes(range(0x20, 0x7F)) + b"\n"  # JSON as it is written here
_SHOWN, _N_SHOWN = 40, 5
_PIECE = 1 << 20
# Why a result does not stand: refused without --restart.
_REFUSED = {
    "model": "of another model",
    "flags": "made with other flags",
    "older": "without digests, as older versions wrote them",
    "gone": "of requests that -i has not",
}
# Computed anew in any case.
_ANEW = {
    "changed": "of requests that were changed",
    "limits": "of requests that failed under other limits",
    "line": "of lines that were no requests",
}
_MAX_BYTES = 4 * MAX_LINE_BYTES
_MODE = 0o600  # texts tell what the prompts were


class Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the results, as JSON has it; a field that says nothing is left out.

    Attributes:
      id: of its request; None of a line that is no request and has none.
      sample: which of several; likewise fields that only some results have.
      line: its number, where it is no request.
      seed: a random one, so that the text can be had again.
      n_chunks: chunks before it, blended by `ratio` and `check_layer`; `n_reused` tokens of them.
      approximations: why it is not the answer of the whole text; then it is `approximate`.
      digest: a `Basis`, as text.
    """

    id: Id | None
    sample: int | None = None
    tokens: Sequence[int]
    text: str
    finish_reason: str
    n_cached: int
    line: int | None = None
    error: str | None = None
    seed: int | None = None
    n_dropped: int = 0
    score: float | None = None
    n_chunks: int | None = None
    ratio: float | None = None
    check_layer: int | None = None
    n_reused: int | None = None
    approximate: bool = False
    approximations: "list[Approximation]" = []
    digest: str | None = None


def failed(id: Id | None, error: str, *, line: int | None = None) -> Result:
    """The line of a request that could not be served; with its number where it is none."""
    return Result(
        id=id, tokens=(), text="", finish_reason="error", n_cached=0, line=line, error=error
    )


class Held(msgspec.Struct, kw_only=True):
    """What counts of a result that is there already; anything may stand in it."""

    id: Any
    finish_reason: Any
    line: Any = None
    error: Any = None
    digest: Any = None

    @property
    def is_of_line(self) -> bool:
        """Whether it says of a line, by its number, that it is no request."""
        return type(self.line) is int and self.error is not None

    @classmethod
    def parse(cls, data: bytes) -> "Held":
        """A line of results; raises ValueError for anything else."""
        try:
            return msgspec.convert(json.loads(data), cls)
        except msgspec.ValidationError as error:
            raise ValueError("it is no result") from error
        except (ValueError, RecursionError) as error:
            raise ValueError("it is no JSON") from error


def _is_torn_write(data: bytes, *, n_lines: int, follows_results: bool) -> bool:
    """Whether bytes up to the end of a file are a torn write of ours, and no one else's file.

    Args:
      data: from the first line that is not whole.
      n_lines: that one write may have.
      follows_results: whether whole results stand before it.
    """
    if b"\0" not in data or data.count(b"\n") > n_lines or data.translate(None, _TEXT + b"\0"):
        return False
    text = data.replace(b"\0", b"")
    if not data.startswith(b"\0"):
        return _begins_like_a_line(data.partition(b"\0")[0])
    return follows_results or not text or BEGIN in text or _END in text


def _begins_like_a_line(data: bytes) -> bool:
    """Whether bytes begin like a line of results, as far as they go."""
    return data.startswith(BEGIN) or BEGIN.startswith(data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What results have to be of.

    Attributes:
      digests: `Basis` of each request, as text, by its id.
      bad: by number of a line that is no request, why.
      restart: whether those are computed anew that would be refused.
      tell: says in a line what is computed anew.
    """

    digests: Mapping[Any, str]
    bad: Mapping[int, str]
    restart: bool
    tell: Callable[[str], None]

    def why_not(self, result: Held) -> str | None:
        """Why a result does not stand; None if it does."""
        if result.is_of_line:
            return None if self.bad.get(result.line) == result.error else "line"
        name = result.id
        # A JSON true would pass for the integer 1.
        if type(name) not in (str, int) or name not in self.digests:
            return "gone"
        old, new = Basis.parse(result.digest), Basis.parse(self.digests[name])
        assert new is not None, "digests of requests are well formed"
        if old is None:
            return "older"
        if old.model != new.model:
            return "model"
        if old.flags != new.flags:
            return "flags"
        if old.request != new.request:
            return "changed" if old.line != new.line else "flags"
        return "limits" if result.error is not None and old.limits != new.limits else None


def settle_results(path: str, fd: int, expected: Expected) -> int:
    """Takes results that do not stand out of a locked file; the descriptor to resume with.

    Args:
      path: of the file.
      fd: its descriptor, which is closed if this raises.
      expected: what results have to be of. A line that is too long, torn or no result is left for
        others to judge.

    Raises:
      UsageError: some would have to be refused; the file is as it was.
      SaveError: it cannot be written; the file is as it was.
    """
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        with open(fd, "rb", closefd=False) as file:
            kept, dropped = _scan(file, expected)
            real = Path(path).resolve()
            former = next(p for p in atomic.backup_names(real) if not os.path.lexists(p))
            refused = {why: ids for why, ids in dropped.items() if why in _REFUSED}
            if refused and not expected.restart:
                raise UsageError(
                    f"-o {path}: holds {_listed(refused, _REFUSED)}; add --restart to take them "
                    "out (what -i asks for is computed anew, the former file is kept as "
                    f"{former}), or give another name, or the requests, model and flags that they "
                    "are of"
                )
            if not dropped:
                os.lseek(fd, 0, os.SEEK_SET)
                return fd
            _rewrite(real, former, file, kept)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    expected.tell(
        f"{path}: taken out: {_listed(dropped, _REFUSED | _ANEW)}; what -i asks for is computed "
        f"anew, the former file is {former}"
    )
    return -1


def _scan(file: BinaryIO, expected: Expected) -> tuple[list[tuple[int, int]], dict[str, list[Any]]]:
    """Stretches of bytes to keep, and by the reason the ids of what does not stand."""
    kept: list[tuple[int, int]] = []
    dropped: dict[str, dict[Any, None]] = {}
    start = 0
    while data := file.readline(_MAX_BYTES):
        end = start + len(data)
        result = _whole_result(data)
        if result is None:
            end = os.fstat(file.fileno()).st_size  # all the rest
        why = None if result is None else expected.why_not(result)
        if why is not None and result is not None:
            name = result.line if why == "line" else json.dumps(result.id)
            dropped.setdefault(why, {})[name] = None
        elif kept and kept[-1][1] == start:
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((start, end))
        start = end
        if result is None:
            break
    return kept, {why: list(ids) for why, ids in dropped.items()}


def _whole_result(data: bytes) -> Held | None:
    """A result; None of anything else, and of what was torn."""
    try:
        return Held.parse(data) if data.endswith(b"\n") else None
    except ValueError:
        return None


def _rewrite(path: Path, former: Path, file: BinaryIO, kept: list[tuple[int, int]]) -> None:
    """Copies a file to its backup, and puts the bytes that are kept in its place."""

    def copy(start: int, end: int, to: int) -> None:
        while start < end and (
            data := atomic.read_at(file.fileno(), min(_PIECE, end - start), start)
        ):
            atomic.write_at(to, data, os.lseek(to, 0, os.SEEK_END))
            start += len(data)

    def whole(to: int) -> None:
        copy(0, os.fstat(file.fileno()).st_size, to)

    def rest(to: int) -> None:
        for start, end in kept:
            copy(start, end, to)

    with atomic.told_of(path):
        atomic.replace(former, whole)
        atomic.replace(path, rest)


def _listed(ids: Mapping[str, list[Any]], whys: Mapping[str, str]) -> str:
    """How many results there are of each reason, and the ids of the first few."""
    said = []
    for why, names in ids.items():
        shown = ", ".join(str(x)[:_SHOWN] for x in names[:_N_SHOWN])
        more = f" and {len(names) - _N_SHOWN:,} more" if len(names) > _N_SHOWN else ""
        count = "1 result" if len(names) == 1 else f"{len(names):,} results"
        said.append(f"{count} {whys[why]} ({shown}{more})")
    return ", ".join(said)


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
            fd = settle_results(path, self._fd, expected)
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

    def write(self, results: Sequence[Result]) -> None:
        """Adds the lines of one request, each with its digest.

        Raises:
          KvrtError: there is no room; the file can be resumed.
        """
        for result in results:
            if result.line is None:
                result.digest = self._digests.get(result.id)
        lines = map(msgspec.to_builtins, results)
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        if self._fd is None:
            output.write_text(text)
        else:
            self._write(self._fd, text.encode())
        self._note(results[0])

    def close(self) -> None:
        """Closes the file, which lets another process write it."""
        if self._fd is not None and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._unlock()

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
                result = self._parse(line, data)
                if n_seen and result.id != of:
                    raise self._foreign(line, f"request {shown_json(of)} before it is not whole")
                of, n_seen, end = result.id, n_seen + 1, end + len(data)
                # One line a sample, and one alone for an error.
                if n_seen == (1 if result.error is not None else self._n_samples[result.id]):
                    self._note(result)
                    n_seen, whole = 0, end
        self.n_cut = os.fstat(fd).st_size - whole
        if self.n_cut:
            os.ftruncate(fd, whole)
            os.fsync(fd)
        os.lseek(fd, whole, os.SEEK_SET)

    def _check_torn(self, line: int, data: bytes, rest: bytes, follows_results: bool) -> None:
        """Refuses an end that no interruption of ours has left."""
        n_lines = max(self._n_samples.values(), default=1)
        if len(rest) < _MAX_BYTES and _is_torn_write(
            data + rest, n_lines=n_lines, follows_results=follows_results
        ):
            return
        if len(data) < _MAX_BYTES and _begins_like_a_line(data) and b"\0" not in data:
            try:
                record = json.loads(data)
            except (ValueError, RecursionError):
                return
            if "finish_reason" in record:
                return
        raise self._foreign(line, "it is no result")

    def _parse(self, line: int, data: bytes) -> Held:
        try:
            result = Held.parse(data)
        except ValueError as error:
            raise self._foreign(line, str(error)) from error
        name = result.id
        if result.is_of_line:
            return result
        # A JSON true would pass for the integer 1.
        if type(name) not in (str, int) or name not in self._n_samples:
            raise self._foreign(line, f"it is of request {shown_json(name)}, which -i has not")
        if name in self.done:
            raise self._foreign(line, f"request {shown_json(name)} is there already")
        return result

    def _note(self, result: Result | Held) -> None:
        """Takes note of a request by its last line, or by any: an error is its only one."""
        self.n_failed += result.error is not None
        if result.line is not None:
            self.reported.add(result.line)
        else:
            assert result.id is not None
            self.done.add(result.id)

    def _foreign(self, line: int, why: str) -> UsageError:
        return UsageError(
            f"-o {self._name}: line {line} is not of these requests: {why}; give another name, or "
            "the -i that belongs to it"
        )

"""The requests of `kvrt batch`: one JSON object a line, each checked by itself.

A first pass checks every line and remembers where it lies; a prompt is read again when it is
served, so that a file of any length costs little memory. A line that is no request is reported by
its number and fails alone.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, BinaryIO, Literal, NoReturn

import msgspec
from msgspec import UNSET, Meta

from kvrt.cli.flags import other_names
from kvrt.cli.flags.serving import BatchOptions
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import UsageError, reason
from kvrt.files.typed_json import shown_json, typed
from kvrt.options.option import flags_of
from kvrt.whole_numbers import Count, Long, Real

MAX_LINE_BYTES = 1 << 24
_MOST_PRIORITY = 1 << 20

Id = Annotated[str, Meta(min_length=1, max_length=256)] | Long  # of a request, as its line has it
_Text = Annotated[str, Meta(min_length=1)]
_Path = Annotated[str, Meta(min_length=1, max_length=4096)]
_Samples = Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
# Keys that no flag has, and those of `kvrt.Request` among them.
_OWN: Mapping[str, Any] = {
    "id": Id,
    "prompt": _Text,
    "tokens": Annotated[tuple[Count, ...], Meta(min_length=1)],
    "chunks": Annotated[tuple[_Path, ...], Meta(min_length=1, max_length=256)],
    "n": _Samples,
    "priority": Annotated[int, Meta(ge=-_MOST_PRIORITY, le=_MOST_PRIORITY)],
    "cache": bool,
}
_BEAMS: Mapping[str, Any] = {
    "num_beams": _Samples,
    "length_penalty": Real,
    "early_stopping": bool | Literal["never"],
}
_ROOM: Mapping[str, Any] = {"quota": Annotated[int, Meta(ge=1, le=2**31 - 1)], "reserve": Count}
_FLAGS = {x.name: x.key_type for x in flags_of(BatchOptions) if x.line is not False}
_KEYS = {**_OWN, **_FLAGS, **_BEAMS, **_ROOM}
_Line = msgspec.defstruct("_Line", [(name, kind, UNSET) for name, kind in _KEYS.items()])
MAX_LINES = 1 << 24
_STDIN = 0


class Wrong(Exception):
    """An error in a line; `id` is the request's where it could be read."""

    def __init__(self, message: str, id: Id | None = None):
        """One line."""
        super().__init__(message)
        self.id = id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as its line has it.

    Attributes:
      id: its name.
      prompt: text; None where `tokens` are given.
      tokens: ids.
      chunks: files of texts that stand before the prompt, blended.
      n: samples.
      priority: lower goes first.
      cache: whether it may use prefixes that others have computed.
      beams: `num_beams`, `length_penalty` and `early_stopping` of `kvrt.Request`.
      room: `quota` and `reserve` of it.
      options: the command's flags, replaced by the line's own values.
      given: keys that the line has.
    """

    id: Id
    prompt: str | None = None
    tokens: tuple[int, ...] = ()
    chunks: tuple[str, ...] = ()
    n: int = 1
    priority: int = 0
    cache: bool = True
    beams: Mapping[str, Any]
    room: Mapping[str, Any]
    options: BatchOptions
    given: frozenset[str]


class Parser:
    """From the bytes of a line to a request."""

    def __init__(self, options: BatchOptions):
        """The command's flags are the defaults of a line."""
        self._options = options

    def parse(self, data: bytes | None) -> Asked:
        """The request; raises Wrong."""
        if data is None:
            raise Wrong(f"longer than {MAX_LINE_BYTES} bytes; shorten the prompt")
        line = _object(data)
        try:
            name: Id = typed(Id, line.get("id"), "id")
        except ValueError as error:
            said = str(error) if "id" in line else str(error).replace("is null", "is missing")
            raise Wrong(said) from error
        try:
            return self._asked(line)
        except ValueError as error:
            raise Wrong(str(error), name) from error

    def _asked(self, line: dict[str, Any]) -> Asked:
        """The request; raises ValueError."""
        for key in line.keys() - _KEYS.keys():
            raise ValueError(_unknown(key))
        values = {k: x for k, x in msgspec.structs.asdict(typed(_Line, line)).items() if k in line}
        if ("prompt" in line) == ("tokens" in line):
            raise ValueError("either prompt or tokens is wanted")
        flags = {k: values[k] for k in _FLAGS if k in line}
        if "stop" in flags:
            stop = flags["stop"]
            flags["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        beams = {k: values[k] for k in _BEAMS if k in line}
        if beams.get("num_beams", 1) > 1 and "temp" not in line:
            flags["temp"] = 0.0  # the flag's is for lines that are sampled
        options = dataclasses.replace(self._options, **flags)
        if options.chat and "tokens" in line:
            raise ValueError("chat needs prompt, tokens gives ids")
        if options.chat and "chunks" in line:
            raise ValueError(
                "chunks stand before a prompt, and a chat template before its text; give one"
            )
        if options.stop and beams.get("num_beams", 1) > 1:
            raise ValueError(
                "stop ends a text as it is read, num_beams compares whole ones; give one"
            )
        return Asked(
            **{k: values[k] for k in _OWN if k in line},
            beams=beams,
            room={k: values[k] for k in _ROOM if k in line},
            options=options,
            given=frozenset(line),
        )


def _unknown(key: str) -> str:
    near = other_names.counterpart(key)
    hint = f" (in kvrt it is {near.flag})" if near and near.flag in _KEYS else ""
    return f"unknown key {shown_json(key)}{hint}; the keys are {', '.join(_KEYS)}"


def _object(data: bytes) -> dict[str, Any]:
    """A JSON object without constants that JSON has not, and without two values of a key."""
    try:
        # Editors of some systems begin a file with a mark, which is none of its text.
        found = _DECODER.decode(data.decode("utf-8-sig"))
        json.dumps(found, ensure_ascii=False).encode()  # an escape may be half of a character
    except UnicodeDecodeError as error:
        raise Wrong(f"byte {error.start} is no UTF-8") from error
    except UnicodeEncodeError as error:
        raise Wrong("no JSON (half of a character)") from error
    except (ValueError, RecursionError) as error:
        raise Wrong(f"no JSON ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise Wrong(f"{shown_json(found)} is no JSON object")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {shown_json(key)} is given twice")
        found[key] = value
    return found


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_pairs)


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

"""Results that a file of `kvrt batch` holds already: which of them still stand.

A result stands if it was computed from the same request, with the same model and flags. One of a
request that was changed since is computed anew; one of another model or of other flags is refused
unless --restart computes it anew as well. What is taken out stays in a copy of the former file.
"""

import dataclasses
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kvrt.cli.batch.digest import Basis
from kvrt.errors import UsageError
from kvrt.files import atomic

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

    def why_not(self, record: Mapping[str, Any]) -> str | None:
        """Why a result does not stand; None if it does."""
        if type(record.get("line")) is int and "error" in record:
            return None if self.bad.get(record["line"]) == record["error"] else "line"
        name = record["id"]
        # A JSON true would pass for the integer 1.
        if type(name) not in (str, int) or name not in self.digests:
            return "gone"
        old, new = Basis.parse(record.get("digest")), Basis.parse(self.digests[name])
        assert new is not None, "digests of requests are well formed"
        if old is None:
            return "older"
        if old.model != new.model:
            return "model"
        if old.flags != new.flags:
            return "flags"
        if old.request != new.request:
            return "changed" if old.line != new.line else "flags"
        return "limits" if "error" in record and old.limits != new.limits else None


def settle_results(path: str, fd: int, expected: Expected, max_bytes: int) -> int:
    """Takes results that do not stand out of a locked file; the descriptor to resume with.

    Args:
      path: of the file.
      fd: its descriptor, which is closed if this raises.
      expected: what results have to be of.
      max_bytes: of a line. What is longer, torn or no result is left for others to judge.

    Raises:
      UsageError: some would have to be refused; the file is as it was.
      SaveError: it cannot be written; the file is as it was.
    """
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        with open(fd, "rb", closefd=False) as file:
            kept, dropped = _scan(file, expected, max_bytes)
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


def _scan(
    file: BinaryIO, expected: Expected, max_bytes: int
) -> tuple[list[tuple[int, int]], dict[str, list[Any]]]:
    """Stretches of bytes to keep, and by the reason the ids of what does not stand."""
    kept: list[tuple[int, int]] = []
    dropped: dict[str, dict[Any, None]] = {}
    start = 0
    while data := file.readline(max_bytes):
        end = start + len(data)
        record = _record(data)
        if record is None:
            end = os.fstat(file.fileno()).st_size  # all the rest
        why = None if record is None else expected.why_not(record)
        if why is not None and record is not None:
            name = record["line"] if why == "line" else json.dumps(record["id"])
            dropped.setdefault(why, {})[name] = None
        elif kept and kept[-1][1] == start:
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((start, end))
        start = end
        if record is None:
            break
    return kept, {why: list(ids) for why, ids in dropped.items()}


def _record(data: bytes) -> dict[str, Any] | None:
    """A result; None of anything else, and of what was torn."""
    try:
        found = json.loads(data) if data.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, dict) and {"id", "finish_reason"} <= set(found)
    return found if whole else None


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

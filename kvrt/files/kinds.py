"""Kinds of files that kvrt writes: how each begins, and what it may replace."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

from kvrt.errors import UsageError, reason
from kvrt.files import atomic, regular

_SHOWN = 16  # bytes of a foreign file in a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file, or of folder.

    Attributes:
      name: a noun with its article, for messages.
      begins: first bytes of a file of this kind; none where nothing may be replaced.
      offsets: where these bytes may stand.
      form: "file", "folder", "either", or "stream": a file that may also be a pipe or a device.
      is_written: False for an input.
      mode: permissions of a new file, before the umask.
    """

    name: str
    begins: tuple[bytes, ...] = ()
    offsets: tuple[int, ...] = (0,)
    form: Literal["file", "folder", "either", "stream"] = "file"
    is_written: bool = True
    mode: int = atomic.MODE

    def check_replaceable(self, path: Path, label: str) -> None:
        """Refuses a path that holds another kind of file.

        Args:
          path: of a file that need not exist; an empty file is of every kind.
          label: the path and its flag, for the message.

        Raises:
          UsageError: it holds another kind of file, or cannot be read.
        """
        try:
            if not self.begins and self.form == "file":
                os.lstat(path)
                raise UsageError(f"{label}: is there already and stays as it is; give another name")
            self._check_form(path)
            head = self._head(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{label}: {reason(error)}; give another name") from error
        if head and not any(head[n:].startswith(self.begins) for n in self.offsets):
            raise UsageError(
                f"{label}: is not {self.name} and stays as it is (it begins with "
                f"{head[:_SHOWN]!r}); give another name"
            )

    def _check_form(self, path: Path) -> None:
        """Raises OSError for a folder in place of a file, and the reverse."""
        if path.is_dir() and self.form in ("folder", "either"):
            return
        if self.form == "folder":
            os.stat(path)
            raise NotADirectoryError(0, "it is a file, not a folder")
        if self.form != "stream":
            regular.check(path)
        elif path.is_dir():
            raise IsADirectoryError(0, "it is a folder, not a file")

    def _head(self, path: Path) -> bytes:
        """First bytes of a regular file, as many as tell its kind."""
        if not path.is_file():
            return b""
        with regular.open_file(path) as file:
            return file.read(max(self.offsets) + max(map(len, self.begins)))


INPUT = FileKind(name="an input", is_written=False, form="stream")
NEW = FileKind(name="a new file")
SESSION = FileKind(name="a session", begins=(b"kvrt-kv\n",), offsets=(0, 512), form="either")
SESSIONS = FileKind(name="a folder of sessions", form="folder")
BLOCKS = FileKind(name="a folder of blocks", form="folder")
RESULTS = FileKind(name="a file of results", begins=(b"{", b"\0"), form="stream")
METRICS = FileKind(name="a file of kvrt's metrics", begins=(b"# HELP kvrt_",), mode=0o666)
PAGE = FileKind(
    name="a page of kvrt inspect",
    begins=(
        b'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        b'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; ',
    ),
    mode=0o666,
)
CHANNELS = FileKind(name="a file of heavy channels", begins=(b'{"kind": "kvrt heavy channels',))
HEADS = FileKind(name="a file of streaming heads", begins=(b'{"streaming": ',), mode=0o666)


def write_whole(path: str | os.PathLike[str], data: bytes, kind: FileKind) -> None:
    """Replaces a file of the same kind; a link stays, and what it points to is replaced.

    Raises:
      UsageError: the path holds another kind of file.
      SaveError: it cannot be written; the file is as it was.
    """
    real = Path(os.path.realpath(path))
    with atomic.locked(real), atomic.told_of(real):
        kind.check_replaceable(real, str(path))
        atomic.replace(real, lambda fd: atomic.write_at(fd, data, 0), mode=kind.mode)

"""The rule for files that flags name: none is replaced by another kind, nor written twice."""

import dataclasses
import itertools
import os
import stat
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from kvrt.errors import UsageError
from kvrt.files import atomic
from kvrt.files.kinds import FileKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedFile:
    """A file or folder that a flag names.

    Attributes:
      label: flag and path, for messages.
      path: as it was given; - is a standard stream.
      kind: what it is read or written as.
    """

    label: str
    path: str
    kind: FileKind

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self.path).name

    def is_same(self, other: "NamedFile") -> bool:
        """True if both name one file; of files that do not exist, names differ by more than case.

        Folders may or may not tell cases apart, and nothing can be asked of a missing file.
        """
        inodes = self._inode(), other._inode()
        if None not in inodes:
            return inodes[0] == inodes[1]
        return self._place() == other._place() is not None

    def check(self) -> None:
        """Refuses what may not be written there.

        Raises:
          UsageError: another kind of file is there, or no folder for it.
          SaveError: the folder takes no file.
        """
        if self.path == "-" or not self.kind.is_written:
            return
        path = Path(self.path)
        self.kind.check_replaceable(path, self.label)
        if self.kind.form in ("file", "either"):
            atomic.check_writable(Path(os.path.realpath(path)), self.label)

    def _inode(self) -> tuple[int, int] | None:
        """Device and inode of a regular file or a folder; None for others, and where it is none."""
        try:
            if self.path == "-":
                found = os.fstat(1 if self.kind.is_written else 0)
            else:
                found = os.stat(self.path)
        except OSError:
            return None
        ours = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
        return (found.st_dev, found.st_ino) if ours else None

    def _place(self) -> tuple[int, int, str] | None:
        """Device and inode of the folder, and the name without case; None if there is none."""
        if self.path == "-":
            return None
        folder, name = os.path.split(os.path.realpath(self.path))
        try:
            found = os.stat(folder)
        except OSError:
            return None
        return found.st_dev, found.st_ino, unicodedata.normalize("NFC", name.casefold())


def check_named(files: Sequence[NamedFile]) -> None:
    """Refuses to write over another kind of file, and to write one file by two flags.

    Raises:
      UsageError: a file of another kind is there, two flags name one file, or there is no folder.
      SaveError: a folder takes no file.
    """
    for file in files:
        file.check()
    for a, b in itertools.combinations(files, 2):
        if not (a.kind.is_written or b.kind.is_written):
            continue
        if a.kind is b.kind and a.kind.form == "folder":
            continue  # Folders of sessions are shared.
        if a.is_same(b):
            by_case = a.name != b.name and a.name.casefold() == b.name.casefold()
            case = " where a folder ignores case" if by_case else ""
            raise UsageError(f"{a.label} and {b.label} name one file{case}; give another name")

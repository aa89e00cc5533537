"""A file that is read from front to back, never beyond its end: each length is checked first."""

import contextlib
import os
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from kvrt.errors import BadSession, reason
from kvrt.files import regular


class Source:
    """Bytes of a file, in their order.

    Attributes:
      name: of the file, for messages.
      left: bytes that were not read yet.
    """

    def __init__(self, name: str, file: BinaryIO, n_bytes: int):
        """Starts at the front of a file of n_bytes."""
        self.name, self._file, self._n_bytes, self.left = name, file, n_bytes, n_bytes

    def need(self, n: int, what: str) -> None:
        """Checks that n bytes are left.

        Raises:
          BadSession: the file ends before.
        """
        if n > self.left:
            raise BadSession(
                f"{self.name}: {what} at byte {self._n_bytes - self.left} needs {n:,} bytes, "
                f"{self.left:,} are left; the file is truncated or damaged, make it again"
            )

    def take(self, n: int, what: str) -> bytes:
        """The next n bytes."""
        self.need(n, what)
        found = self._file.read(n)
        if len(found) < n:
            raise BadSession(f"{self.name}: became shorter while it was read; try again")
        self.left -= n
        return found

    def array(self, n: int, dtype: np.dtype, what: str) -> np.ndarray:
        """The next n numbers, little-endian."""
        return np.frombuffer(self.take(n * dtype.itemsize, what), dtype.newbyteorder("<"))

    def number(self, kind: str, what: str) -> int:
        """The next number: "u4", "i4" or "u8"."""
        return int(self.array(1, np.dtype(kind), what)[0])

    def back(self, n: int) -> None:
        """Goes back by n bytes."""
        self._file.seek(-n, os.SEEK_CUR)
        self.left += n

    def skip(self, n: int) -> None:
        """Passes over the next n bytes."""
        self.need(n, "what follows")
        self._file.seek(n, os.SEEK_CUR)
        self.left -= n

    def end(self) -> None:
        """Checks that all was read.

        Raises:
          BadSession: something follows.
        """
        if self.left:
            raise BadSession(
                f"{self.name}: {self.left:,} bytes follow the session; the file is damaged, or of "
                "a model with other layers"
            )


@contextlib.contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[Source]:
    """Opens a file to read it once.

    Raises:
      BadSession: it cannot be opened or read, or is no regular file.
    """
    try:
        with regular.open_file(path) as file:
            yield Source(str(path), file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        why = reason(error)
        raise BadSession(f"{path}: cannot be read: {why}; give a session file") from error

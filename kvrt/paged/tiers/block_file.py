"""A file of blocks: slots of one size, each with the name of its block and a digest of all.

    0      magic, sizes and the fingerprint of what the blocks belong to
    4096   slot 0: digest, length of the name, name, bytes of the block; slots are a whole number
           of 512 bytes

A slot is valid if its name is the wanted one and its xxh3-128 is right, so a torn, damaged or
missing one is a block that is not there, and what a killed process left is found by the next one.
Nothing but the beginning is synced: a cache may lose what it holds.
"""

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from kvrt.errors import BadConfig, reason
from kvrt.files import regular

_MAGIC = b"kvrt tier 1\n"
_HEAD = struct.Struct("<12sIQ16s")  # magic, bytes a name, bytes a block, fingerprint's digest
_SLOT = struct.Struct("<16sI")  # digest, bytes of the name
_NOTHING = bytes(16)  # in place of a digest
_START, _UNIT = 4096, 512
_MODE = 0o600  # cached keys and values reveal the prompt
# What the system says when there is no room, or the disk does not work: that store fails alone.
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class BlockFile:
    """Slots of a file, for one process at a time; several threads may use different slots.

    Args:
      path: the file; a lock file lies beside it.
      block_bytes: of each block.
      n_slots: that it may have; what lies beyond is cut off.
      fingerprint: of what the blocks belong to: the model, its layout, its KV dtypes.
      *older: what a file of before may have instead; it gets `fingerprint` when it is opened.
      n_name: bytes of a name at most.
    """

    def __init__(
        self,
        path: Path,
        block_bytes: int,
        n_slots: int,
        fingerprint: bytes,
        *older: bytes,
        n_name: int = 1024,
    ) -> None:
        """Opens the file, or makes an empty one.

        Raises:
          BadConfig: it is another one's, in use, or cannot be opened; it is as it was.
        """
        if min(block_bytes, n_slots, n_name) < 1:
            raise BadConfig(
                f"{n_slots} slots of {block_bytes} bytes with names of {n_name}; all must be at "
                "least 1"
            )
        self.block_bytes, self.n_slots, self.n_name = block_bytes, n_slots, n_name
        self.slot_bytes = -(-(_SLOT.size + self.n_name + block_bytes) // _UNIT) * _UNIT
        self._path = path
        self._head, *self._older = [
            _HEAD.pack(_MAGIC, n_name, block_bytes, xxhash.xxh3_128_digest(x))
            for x in (fingerprint, *older)
        ]
        lock = path.with_name(f".{path.name}.lock")
        self._lock = FileLock(lock, timeout=0, mode=_MODE, thread_local=False)
        self._fd = self._open()

    def names(self) -> Iterator[tuple[int, bytes]]:
        """Slots that are in use, and their names; the digest is checked by `read`."""
        n_bytes = max(os.fstat(self._fd).st_size - _START, 0)
        for slot in range(min(-(-n_bytes // self.slot_bytes), self.n_slots)):
            head = os.pread(self._fd, _SLOT.size + self.n_name, self._offset(slot))
            if len(head) == _SLOT.size + self.n_name:
                digest, n_name = _SLOT.unpack_from(head)
                if digest != _NOTHING and 0 < n_name <= self.n_name:
                    yield slot, head[_SLOT.size : _SLOT.size + n_name]

    def write(self, slot: int, name: bytes, block: np.ndarray) -> bool:
        """Writes a block, uint8[block_bytes].

        False if the system refused; the slot holds nothing then.
        """
        assert 0 < len(name) <= self.n_name and 0 <= slot < self.n_slots
        block = np.ascontiguousarray(block)
        named = len(name).to_bytes(4, "little") + name.ljust(self.n_name, b"\0")
        at = self._offset(slot)
        try:
            # Without a digest until all is there: no part of it can be taken for something.
            _write_all(self._fd, [_NOTHING], at)
            _write_all(self._fd, [named, block.data], at + len(_NOTHING))
            _write_all(self._fd, [_digest(name, block)], at)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return False
        return True

    def read(self, slot: int, name: bytes, out: np.ndarray) -> bool:
        """Reads a block into `out`, uint8[block_bytes].

        False if the slot holds no sound block of this name; `out` may hold anything then.
        """
        head = bytearray(_SLOT.size + self.n_name)
        try:
            n = os.preadv(self._fd, [head, out.data], self._offset(slot))
            if n < len(head):
                return False
            done = n - len(head)
            while done < len(out):
                at = self._offset(slot) + len(head) + done
                n = os.preadv(self._fd, [out.data[done:]], at)
                if n == 0:
                    return False
                done += n
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return False
        digest, n_name = _SLOT.unpack_from(head)
        found = bytes(head[_SLOT.size :][:n_name])
        return found == name and digest == _digest(name, out)

    def close(self) -> None:
        """Closes the file and lets others have it."""
        os.close(self._fd)
        self._lock.release()

    def _open(self) -> int:
        path = self._path
        try:
            os.stat(path.parent)  # FileLock would make the folder
            self._lock.acquire()
        except Timeout as error:
            raise BadConfig(f"{path} is in use by another process; give another name") from error
        except OSError as error:
            raise BadConfig(f"{path} cannot be used: {reason(error)}; give another name") from error
        fd = -1
        try:
            fd = regular.open_fd(path, os.O_RDWR | os.O_CREAT, _MODE)
            self._check_head(fd)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            self._lock.release()
            if isinstance(error, OSError):
                why = reason(error)
                raise BadConfig(f"{path} cannot be used: {why}; give another name") from error
            raise
        return fd

    def _check_head(self, fd: int) -> None:
        found = os.pread(fd, _HEAD.size, 0)
        is_new = self._is_torn(found) and os.fstat(fd).st_size <= _HEAD.size
        if is_new or found in self._older:
            _write_all(fd, [self._head], 0)
            # Slots may be lost, and the file would be nobody's without this.
            os.fsync(fd)
        elif found[: len(_MAGIC)] != _MAGIC:
            raise BadConfig(f"{self._path} holds no blocks of kvrt; give another name")
        elif found != self._head:
            raise BadConfig(
                f"{self._path} holds blocks of another model, layout or block size, or of "
                "another policy by score; give another name or remove it"
            )
        end = self._offset(self.n_slots)
        if os.fstat(fd).st_size > end:
            os.ftruncate(fd, end)

    def _is_torn(self, found: bytes) -> bool:
        """Whether a head is what a power loss leaves of ours: some of its bytes, zeros or nothing.

        A whole one is not.
        """
        some = all(a in (0, b) for a, b in zip(found, self._head, strict=False))
        return some and found != self._head

    def _offset(self, slot: int) -> int:
        return _START + slot * self.slot_bytes


def _digest(name: bytes, block: np.ndarray) -> bytes:
    hashed = xxhash.xxh3_128(len(name).to_bytes(4, "little") + name)
    hashed.update(block.data)
    return hashed.digest()


def _write_all(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        n = os.pwritev(fd, left, offset)
        offset += n
        while left and n >= len(left[0]):
            n -= len(left.pop(0))
        if left:
            left[0] = left[0][n:]

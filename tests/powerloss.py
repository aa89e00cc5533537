"""Power loss, simulated: every state that a disk may be in when it fails during a save.

`recording` notes the calls that change files below a folder while they run. `states` of
`powerloss_states.py` then gives, for every prefix of that record, what the folder may hold when the
power goes there.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# Bytes of files by path, None of folders.
Tree = Mapping[str, bytes | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Write:
    """Bytes at an offset of a file."""

    of: int
    offset: int
    data: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncate:
    """A new length of a file."""

    of: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Name:
    """Entries of one folder or two that change together: (folder, name, what it names or None)."""

    of: int
    entries: tuple[tuple[int, str, int | None], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """An fsync of a file or a folder."""

    of: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment of the test's own, such as a call that returned."""

    of: int = -1
    text: str


Event = Write | Truncate | Name | Sync | Mark


@dataclasses.dataclass
class Disk:
    """Files and folders by number; 0 is the root."""

    files: dict[int, bytearray] = dataclasses.field(default_factory=dict)
    folders: dict[int, dict[str, int]] = dataclasses.field(default_factory=dict)

    def copy(self):
        return Disk(
            {i: bytearray(x) for i, x in self.files.items()},
            {i: dict(x) for i, x in self.folders.items()},
        )

    def apply(self, event: Event, fate: str = "kept") -> None:
        if fate == "lost" or isinstance(event, Sync | Mark):
            return
        if isinstance(event, Name):
            for folder, name, what in event.entries:
                if what is None:
                    self.folders[folder].pop(name, None)
                else:
                    self.folders[folder][name] = what
            return
        data = self.files[event.of]
        if isinstance(event, Truncate):
            data[:] = data[: event.size].ljust(event.size, b"\0")
            return
        end, half = event.offset + len(event.data), len(event.data) // 2
        if fate == "head":
            end = event.offset + half
        if len(data) < end:
            data.extend(bytes(end - len(data)))
        if fate == "tail":
            data[event.offset + half : end] = event.data[half:]
        elif fate != "length":
            data[event.offset : end] = event.data[: end - event.offset]

    def tree(self) -> dict[str, bytes | None]:
        """What can be reached from the root."""
        found: dict[str, bytes | None] = {}
        todo = [("", 0)]
        while todo:
            path, folder = todo.pop()
            for name, what in self.folders[folder].items():
                at = f"{path}/{name}" if path else name
                if what in self.folders:
                    found[at] = None
                    todo.append((at, what))
                else:
                    found[at] = bytes(self.files[what])
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A folder before, and what was done to it."""

    before: Disk
    events: Sequence[Event]


class Recorder:
    """Follows the calls of one process below a folder; they are carried out as well.

    Attributes:
      left_out: kinds ("file", "folder") and numbers of fsyncs that are not done, as if forgotten.
    """

    def __init__(self, root: Path, left_out: Sequence[tuple[str, int]] = ()):
        self.root, self.left_out = root, set(left_out)
        self.events: list[Event] = []
        self._fds: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self.n_syncs = {"file": 0, "folder": 0}
        self._next = itertools.count(1)
        self.disk = Disk(folders={0: {}})
        self.look()
        self.before = self.disk.copy()
        self.events.clear()

    def mark(self, text: str) -> None:
        self.events.append(Mark(text=text))

    def look(self) -> None:
        """Takes note of what is there by calls that are not followed, as if nothing were synced."""
        tree, known = _read(self.root), self.disk.tree()
        for path in sorted(known.keys() - tree.keys(), reverse=True):
            self._name(path, None)
        for path, data in sorted(tree.items()):
            if path not in known:
                self._name(path, self._new(data is None))
            if data is not None and data != known.get(path, b""):
                number = self._find(path)
                self._do(Truncate(of=number, size=len(data)))
                self._do(Write(of=number, offset=0, data=data))

    def _do(self, event: Event) -> None:
        self.events.append(event)
        self.disk.apply(event)

    def _new(self, is_folder: bool) -> int:
        number = next(self._next)
        if is_folder:
            self.disk.folders[number] = {}
        else:
            self.disk.files[number] = bytearray()
        return number

    def _find(self, path: str) -> int:
        number = 0
        for part in filter(None, path.split("/")):
            number = self.disk.folders[number][part]
        return number

    def _name(self, path: str, what: int | None, source: str | None = None) -> None:
        entries = [(self._find(os.path.dirname(path)), os.path.basename(path), what)]
        if source is not None:
            entries.append((self._find(os.path.dirname(source)), os.path.basename(source), None))
        self._do(Name(of=entries[0][0], entries=tuple(entries)))

    def _path(self, path, dir_fd=None) -> str | None:
        """Below the root; None elsewhere and for locks, which hold nothing."""
        if isinstance(path, int):
            return None
        if dir_fd is not None:
            path = Path(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = Path(os.path.abspath(path))
        if not path.is_relative_to(self.root) or path.name.endswith(".lock"):
            return None
        return "" if path == self.root else path.relative_to(self.root).as_posix()

    def calls(self) -> dict[str, Callable]:
        """Functions for the module os in place of its own."""
        real = {n: getattr(os, n) for n in _CALLS}

        def open_(path, flags, mode=0o777, *, dir_fd=None):
            at = self._path(path, dir_fd)
            there = at is not None and (at == "" or at in self.disk.tree())
            fd = real["open"](path, flags, mode, dir_fd=dir_fd)
            if at is not None:
                if not there:
                    self._name(at, self._new(False))
                self._fds[fd], self._offsets[fd] = self._find(at), 0
                if flags & os.O_TRUNC and there:
                    self._do(Truncate(of=self._fds[fd], size=0))
            return fd

        def close(fd):
            self._fds.pop(fd, None)
            return real["close"](fd)

        def written(fd, data, offset):
            if fd in self._fds:
                self._do(Write(of=self._fds[fd], offset=offset, data=bytes(data)))

        def pwrite(fd, data, offset):
            n = real["pwrite"](fd, data, offset)
            written(fd, memoryview(data)[:n], offset)
            return n

        def pwritev(fd, parts, offset):
            n = real["pwritev"](fd, parts, offset)
            written(fd, b"".join(map(bytes, parts))[:n], offset)
            return n

        def write(fd, data):
            at = os.lseek(fd, 0, os.SEEK_CUR) if fd in self._fds else 0
            n = real["write"](fd, data)
            written(fd, memoryview(data)[:n], at)
            return n

        def ftruncate(fd, size):
            real["ftruncate"](fd, size)
            if fd in self._fds:
                self._do(Truncate(of=self._fds[fd], size=size))

        def fsync(fd):
            if fd not in self._fds:
                return real["fsync"](fd)
            kind = "folder" if self._fds[fd] in self.disk.folders else "file"
            n, self.n_syncs[kind] = self.n_syncs[kind], self.n_syncs[kind] + 1
            if (kind, n) not in self.left_out:
                self._do(Sync(of=self._fds[fd]))

        def rename(source, target):
            real["rename"](source, target)
            a, b = self._path(source), self._path(target)
            if a is not None and b is not None:
                self._name(b, self._find(a), a)

        def removed(name):
            def call(path, *, dir_fd=None):
                at = self._path(path, dir_fd)
                real[name](path, dir_fd=dir_fd)
                if at is not None:
                    self._name(at, None)

            return call

        def mkdir(path, mode=0o777, *, dir_fd=None):
            real["mkdir"](path, mode, dir_fd=dir_fd)
            at = self._path(path, dir_fd)
            if at is not None:
                self._name(at, self._new(True))

        return {
            **{"open": open_, "close": close, "write": write, "pwrite": pwrite},
            **{"pwritev": pwritev, "ftruncate": ftruncate, "fsync": fsync, "mkdir": mkdir},
            **{"rename": rename, "replace": rename},
            **{name: removed(name) for name in ("unlink", "remove", "rmdir")},
        }


_CALLS = (
    *("open", "close", "write", "pwrite", "pwritev", "ftruncate", "fsync", "rename", "replace"),
    *("unlink", "remove", "rmdir", "mkdir"),
)


@contextlib.contextmanager
def recording(
    root: Path, monkeypatch, left_out: Sequence[tuple[str, int]] = ()
) -> Iterator[Recorder]:
    """Records what is done below a folder, and makes sure that nothing of it was missed."""
    recorder = Recorder(root, left_out)
    with monkeypatch.context() as patch:
        for name, call in recorder.calls().items():
            patch.setattr(os, name, call)
        yield recorder
    assert recorder.disk.tree() == _read(root), "something was done by a call that is not followed"


def _read(root: Path) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for path in root.rglob("*"):
        if not path.name.endswith(".lock"):
            at = path.relative_to(root).as_posix()
            found[at] = None if path.is_dir() else path.read_bytes()
    return found

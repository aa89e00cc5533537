"""Sessions of a folder: what is there, with an index or without, and what its index gets."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from kvrt.cli.process import output
from kvrt.cli.session.open_session import is_library
from kvrt.errors import KvrtError, UsageError
from kvrt.session.library import stored
from kvrt.session.library.content import content_of
from kvrt.session.library.entries import Content, Entry
from kvrt.session.library.library import Library


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """The sessions of a folder.

    Attributes:
      folder: where they lie.
      entries: of all, newest use first.
      contents: of those that the index does not know as they are now, by name.
      refused: why other files are no sessions, by name.
      is_news: the index does not say all of it.
    """

    folder: Path
    entries: tuple[Entry, ...]
    contents: Mapping[str, Content]
    refused: Mapping[str, str]
    is_news: bool


def open_library(name: str | None) -> Library:
    """The library of a folder that is there.

    Raises:
      UsageError: it is none.
    """
    assert name is not None
    if not is_library(Path(name)):
        found = "is one session in a folder" if Path(name).is_dir() else "is no folder of sessions"
        raise UsageError(f"{name}: {found}; give a folder that holds session files")
    return Library(Path(name), tell=output.note)


def survey(library: Library) -> Survey:
    """Looks at all files of a folder; nothing is written.

    A file that is not in the index was used last when the system says that it was read or changed.

    Raises:
      BadSession: the index is damaged.
    """
    scan = library.scan()
    entries, contents, refused = list(scan.entries), {}, {}
    for name in scan.others:
        path = library.folder / name
        status = stored.status(path)
        if status is None:
            continue  # It has gone meanwhile.
        try:
            contents[name] = content_of(path)
        except KvrtError as error:
            refused[name] = str(error)
            continue
        entries.append(
            Entry(
                path=path,
                fingerprint=contents[name].fingerprint,
                n_tokens=len(contents[name].tokens),
                n_bytes=contents[name].n_bytes,
                size=status.st_size,
                mtime_ns=status.st_mtime_ns,
                used_ns=stored.last_use_ns(status),
            )
        )
    entries.sort(key=lambda e: (-e.used_ns, e.path.name))
    return Survey(
        folder=library.folder,
        entries=tuple(entries),
        contents=contents,
        refused=refused,
        is_news=bool(contents or scan.n_stale),
    )

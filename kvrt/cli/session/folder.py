"""`kvrt ls` and `kvrt prune`: the sessions of a folder, with an index or without."""

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrt.cli.flags.session_files import LsOptions, PruneOptions
from kvrt.cli.process import output
from kvrt.cli.report.tables import table
from kvrt.errors import BadSession, KvrtError, UsageError
from kvrt.options.size import show_size
from kvrt.session import fingerprint, io
from kvrt.session.io import is_library
from kvrt.session.library import stored
from kvrt.session.library.library import Library, content_of
from kvrt.session.library.stored import Content, Entry, due


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


def execute_ls(options: LsOptions) -> int:
    """Runs the command and returns its exit code; files that are no sessions are named."""
    library = open_library(options.folder)
    if options.rebuild:
        refused = library.rebuild().refused
        entries = library.entries()
    else:
        found = survey(library)
        entries, refused = found.entries, found.refused
        try:
            if found.is_news:
                library.take_in(entries, found.contents)
        except BadSession:
            raise
        except KvrtError as error:
            output.warn(f"the index is not up to date: {error}")
    if options.json:
        output.write_text(json.dumps([_entry_fields(e) for e in entries]) + "\n")
    else:
        heads = ("session", "tokens", "bytes", "used", "model", "fingerprint")
        output.write_text(table(heads, map(_listed, entries)))
    for why in refused.values():
        output.warn(why)
    return 0


def last_use(entry: Entry) -> str:
    """When a session was used last, as people read it."""
    used = datetime.datetime.fromtimestamp(entry.used_ns / 1e9)
    return used.isoformat(" ", "seconds")


def _listed(entry: Entry) -> tuple[str, ...]:
    n_tokens, n_bytes = f"{entry.n_tokens:,}", f"{entry.n_bytes:,}"
    name = model_of(entry) or "-"
    return entry.path.name, n_tokens, n_bytes, last_use(entry), name, entry.fingerprint[:12]


def model_of(entry: Entry) -> str:
    """The name of a session's model; "" where the session does not say it."""
    try:
        said = io.read_cells(entry.path, is_use=False)[0].fingerprint
    except KvrtError:
        return ""
    return fingerprint.named_model(said)


def _entry_fields(entry: Entry) -> dict[str, str | int]:
    return {
        "path": str(entry.path),
        "n_tokens": entry.n_tokens,
        "n_bytes": entry.n_bytes,
        "used_ns": entry.used_ns,
        "fingerprint": entry.fingerprint,
        "model": model_of(entry),
    }


def execute_prune(options: PruneOptions) -> int:
    """Runs the command and returns its exit code; files that are no sessions stay."""
    library, budget = open_library(options.folder), options.size("budget") or 0
    found = survey(library)
    wanted = gone = due(found.entries, budget)
    if gone and not options.dry_run:
        library.take_in(found.entries, found.contents)
        gone = library.prune(budget)
    names = {e.path.name for e in gone}
    in_use = {e.path.name for e in wanted} - names
    kept = [e for e in reversed(found.entries) if e.path.name not in names]
    n_bytes = sum(e.n_bytes for e in found.entries)
    why = f"used least recently; {show_size(n_bytes)} are above {show_size(budget)}"

    def why_kept(entry: Entry) -> str:
        is_used = entry.path.name in in_use
        return "saved by another process meanwhile" if is_used else "within the budget"

    verb = "would be deleted" if options.dry_run else "deleted"
    rows = [*((e, verb, why) for e in gone), *((e, "kept", why_kept(e)) for e in kept)]
    refused = {k: x.removeprefix(f"{found.folder}{os.sep}") for k, x in found.refused.items()}
    _report(options, rows, refused)
    if not options.quiet:
        output.note(
            f"{len(gone):,} of {len(rows):,} sessions {verb}, "
            f"{sum(e.n_bytes for e in gone):,} bytes; "
            f"{sum(e.n_bytes for e in kept):,} are left"
        )
    return 0


def _report(
    options: PruneOptions, rows: Sequence[tuple[Entry, str, str]], refused: Mapping[str, str]
) -> None:
    """Writes what goes first, what stays, and files that are no sessions; each with its reason."""
    if not options.json:
        lines = [(e.path.name, f"{e.n_bytes:,}", last_use(e), *said) for e, *said in rows]
        lines += [(name, "", "", "kept", why) for name, why in refused.items()]
        output.write_text(table(("session", "bytes", "last use", "", "why"), lines))
        return
    fields: dict[str, Any] = {"dry_run": options.dry_run, "deleted": [], "kept": []}
    for entry, fate, why in rows:
        said = {"path": str(entry.path), "n_bytes": entry.n_bytes, "used_ns": entry.used_ns}
        fields["kept" if fate == "kept" else "deleted"].append(said | {"why": why})
    output.write_text(json.dumps(fields | {"no_sessions": refused}) + "\n")

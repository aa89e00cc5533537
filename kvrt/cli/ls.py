"""`kvrt ls`: the sessions of a folder."""

import datetime
import json
from pathlib import Path

from kvrt.cli import folder, output
from kvrt.cli.head import is_library
from kvrt.cli.session_options import LsOptions
from kvrt.cli.tables import table
from kvrt.errors import UsageError
from kvrt.session.library import Entry, Library


def execute(options: LsOptions) -> int:
    """Runs the command and returns its exit code; files that are no sessions are named.

    Raises:
      UsageError: it is no folder.
      BadSession: the index is damaged.
    """
    library = open_folder(options.folder)
    if options.rebuild:
        refused = dict(library.rebuild(folder.content).refused)
    else:
        refused = folder.take_in(library)
    entries = library.entries()
    if options.json:
        output.write_text(json.dumps([_fields(e) for e in entries]) + "\n")
    else:
        rows = [
            (e.path.name, f"{e.n_tokens:,}", f"{e.n_bytes:,}", _when(e), e.fingerprint[:12])
            for e in entries
        ]
        output.write_text(table(("session", "tokens", "bytes", "used", "fingerprint"), rows))
    for why in refused.values():
        output.warn(why)
    return 0


def open_folder(name: str | None) -> Library:
    """The library of a folder that is there.

    Raises:
      UsageError: it is none.
    """
    assert name is not None
    if not is_library(Path(name)):
        raise UsageError(f"{name}: is no folder of sessions; give one")
    return Library(Path(name))


def _when(entry: Entry) -> str:
    used = datetime.datetime.fromtimestamp(entry.used_ns / 1e9)
    return used.isoformat(" ", "seconds")


def _fields(entry: Entry) -> dict[str, str | int]:
    return {
        "path": str(entry.path),
        "n_tokens": entry.n_tokens,
        "n_bytes": entry.n_bytes,
        "used_ns": entry.used_ns,
        "fingerprint": entry.fingerprint,
    }

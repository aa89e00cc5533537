"""`kvrt ls`: the sessions of a folder."""

import datetime
import json

from kvrt.cli.flags.session_files import LsOptions
from kvrt.cli.library import survey
from kvrt.cli.process import output
from kvrt.cli.report.tables import table
from kvrt.errors import BadSession, KvrtError
from kvrt.session.library.entries import Entry


def execute(options: LsOptions) -> int:
    """Runs the command and returns its exit code; files that are no sessions are named.

    Raises:
      UsageError: it is no folder.
      BadSession: the index is damaged.
    """
    library = survey.open_library(options.folder)
    if options.rebuild:
        refused = library.rebuild().refused
        entries = library.entries()
    else:
        found = survey.survey(library)
        entries, refused = found.entries, found.refused
        try:
            if found.is_news:
                library.take_in(entries, found.contents)
        except BadSession:
            raise
        except KvrtError as error:
            output.warn(f"the index is not up to date: {error}")
    if options.json:
        output.write_text(json.dumps([_fields(e) for e in entries]) + "\n")
    else:
        rows = [
            (e.path.name, f"{e.n_tokens:,}", f"{e.n_bytes:,}", last_use(e), e.fingerprint[:12])
            for e in entries
        ]
        output.write_text(table(("session", "tokens", "bytes", "used", "fingerprint"), rows))
    for why in refused.values():
        output.warn(why)
    return 0


def last_use(entry: Entry) -> str:
    """When a session was used last, as people read it."""
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

"""`kvrt ls`: the sessions of a folder."""

import datetime
import json

from kvrt.cli.flags.session_files import LsOptions
from kvrt.cli.library import survey
from kvrt.cli.process import output
from kvrt.cli.report.tables import table
from kvrt.errors import BadSession, KvrtError
from kvrt.session import fingerprint, io
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
        heads = ("session", "tokens", "bytes", "used", "model", "fingerprint")
        output.write_text(table(heads, map(_row, entries)))
    for why in refused.values():
        output.warn(why)
    return 0


def last_use(entry: Entry) -> str:
    """When a session was used last, as people read it."""
    used = datetime.datetime.fromtimestamp(entry.used_ns / 1e9)
    return used.isoformat(" ", "seconds")


def _row(entry: Entry) -> tuple[str, ...]:
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


def _fields(entry: Entry) -> dict[str, str | int]:
    return {
        "path": str(entry.path),
        "n_tokens": entry.n_tokens,
        "n_bytes": entry.n_bytes,
        "used_ns": entry.used_ns,
        "fingerprint": entry.fingerprint,
        "model": model_of(entry),
    }

"""`kvrt prune`: deletes the sessions of a folder that were used least recently."""

import json
import os
from collections.abc import Collection, Sequence
from typing import Any

from kvrt.cli.flags.session_files import PruneOptions
from kvrt.cli.library import survey
from kvrt.cli.library.ls import last_use
from kvrt.cli.process import output
from kvrt.cli.report.tables import table
from kvrt.options.size import show_size
from kvrt.session.library.entries import Entry, due


def execute(options: PruneOptions) -> int:
    """Runs the command and returns its exit code; files that are no sessions stay.

    Raises:
      UsageError: it is no folder.
      BadSession: the index is damaged.
      KvrtError: a file cannot be deleted.
    """
    library, budget = survey.open_library(options.folder), options.size("budget") or 0
    found = survey.survey(library)
    wanted = gone = due(found.entries, budget)
    if gone and not options.dry_run:
        library.take_in(found.entries, found.contents)
        gone = library.prune(budget)
    stays = frozenset(e.path.name for e in wanted) - {e.path.name for e in gone}
    report = Report(found, gone, budget, stays, dry_run=options.dry_run)
    output.write_text(report.to_json() if options.json else report.to_table())
    if not options.quiet:
        output.note(report.summary())
    return 0


class Report:
    """Which sessions go, which stay, and why."""

    def __init__(
        self,
        found: survey.Survey,
        gone: Sequence[Entry],
        budget: int,
        in_use: Collection[str],
        *,
        dry_run: bool,
    ):
        """With what was found, what was deleted of it or would be, and the budget in bytes.

        Sessions `in_use` were due, and others saved them meanwhile.
        """
        self._in_use = in_use
        self._gone, self._dry_run = gone, dry_run
        names = {e.path.name for e in gone}
        self._kept = [e for e in found.entries if e.path.name not in names]
        folder_of = f"{found.folder}{os.sep}"
        self._refused = {k: why.removeprefix(folder_of) for k, why in found.refused.items()}
        n_bytes = sum(e.n_bytes for e in found.entries)
        self._why = f"used least recently; {show_size(n_bytes)} are above {show_size(budget)}"

    def to_table(self) -> str:
        """A line for each file, what goes first."""
        verb = "would be deleted" if self._dry_run else "deleted"
        rows = [_row(e, verb, self._why) for e in self._gone]
        rows += [_row(e, "kept", self._why_kept(e)) for e in reversed(self._kept)]
        rows += [(name, "", "", "kept", why) for name, why in self._refused.items()]
        return table(("session", "bytes", "last use", "", "why"), rows)

    def to_json(self) -> str:
        """One object in a line."""
        fields = {
            "dry_run": self._dry_run,
            "deleted": [_fields(e, self._why) for e in self._gone],
            "kept": [_fields(e, self._why_kept(e)) for e in reversed(self._kept)],
            "no_sessions": self._refused,
        }
        return json.dumps(fields) + "\n"

    def _why_kept(self, entry: Entry) -> str:
        is_used = entry.path.name in self._in_use
        return "saved by another process meanwhile" if is_used else "within the budget"

    def summary(self) -> str:
        """One line."""
        n, verb = len(self._gone), "would be deleted" if self._dry_run else "deleted"
        return (
            f"{n:,} of {n + len(self._kept):,} sessions {verb}, "
            f"{sum(e.n_bytes for e in self._gone):,} bytes; "
            f"{sum(e.n_bytes for e in self._kept):,} are left"
        )


def _row(entry: Entry, verb: str, why: str) -> tuple[str, ...]:
    return entry.path.name, f"{entry.n_bytes:,}", last_use(entry), verb, why


def _fields(entry: Entry, why: str) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "n_bytes": entry.n_bytes,
        "used_ns": entry.used_ns,
        "why": why,
    }

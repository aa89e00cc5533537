"""`kvrt prune`: deletes the sessions of a folder that were used least recently."""

from kvrt.cli import folder, output
from kvrt.cli.ls import open_folder
from kvrt.cli.session_options import PruneOptions


def execute(options: PruneOptions) -> int:
    """Runs the command and returns its exit code; files that are no sessions stay.

    Raises:
      UsageError: it is no folder.
      BadSession: the index is damaged.
      KvrtError: a file cannot be deleted.
    """
    library = open_folder(options.folder)
    folder.take_in(library)
    gone = library.prune(options.max_bytes())
    for entry in gone:
        output.write_text(f"{entry.path}\n")
    if not options.quiet:
        left = library.entries()
        output.note(
            f"{len(gone)} of {len(gone) + len(left)} sessions deleted, "
            f"{sum(e.n_bytes for e in gone):,} bytes; {sum(e.n_bytes for e in left):,} are left"
        )
    return 0

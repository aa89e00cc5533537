"""`kvrt trim`: a session written anew, without what later saves have replaced in it."""

import os
from pathlib import Path

import numpy as np

from kvrt import session
from kvrt.cli.flags.session_files import TrimOptions
from kvrt.cli.process import output
from kvrt.cli.session.fork import cut_at, note_checkpoints
from kvrt.cli.session.open_session import existing, real_path
from kvrt.errors import BadSession, SaveError
from kvrt.session.change import replace
from kvrt.session.kv_file import file as kv_file
from kvrt.session.library.stored import bytes_on_disk
from kvrt.session.snapshot import Snapshot


def execute(options: TrimOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from being done; the session is as it was then.
    """
    assert options.session is not None
    path = real_path(existing(Path(options.session)))
    new = path if options.output is None else Path(options.output)
    snapshot = session.read(path)
    before = bytes_on_disk(path)
    short = snapshot if options.keep is None else cut_at(snapshot, options.keep, "--keep")
    kept = _write(new, snapshot, short)
    if not options.quiet:
        after = bytes_on_disk(new)
        output.note(f"{new}: {after:,} bytes, {before - after:,} less than before")
        note_checkpoints(new, snapshot, short)
        if kept is not None:
            output.note(f"{new}: the former session is kept as {kept}")
    return 0


def _write(path: Path, old: Snapshot, new: Snapshot) -> Path | None:
    """Writes a session anew; returns where the former one is, if tokens of it went."""
    kept: list[Path] = []

    def before(path: Path) -> None:
        if not os.path.lexists(path):
            return
        held, read = replace.read_held(path), replace.held_by(old)
        if not np.array_equal(held.ids, read.ids) or held.n_more != read.n_more:
            raise SaveError(f"{path}: another process has changed it meanwhile; trim it again")
        if new is not old:
            kept.append(replace.keep_former(path))

    try:
        if path.is_dir():
            session.save(path, new, before=before)
        else:
            kv_file.save(path, new, anew=True, before=before)
    except BadSession as error:
        raise SaveError(f"{error}; it was sound a moment ago, trim it again") from error
    return kept[0] if kept else None

"""`kvrt trim`: a session written anew, without what later saves have replaced in it."""

from pathlib import Path

from kvrt import session
from kvrt.cli import output
from kvrt.cli.fork import cut_at
from kvrt.cli.session_options import TrimOptions


def execute(options: TrimOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from being done; the session is as it was then.
    """
    assert options.session is not None
    path = Path(options.session)
    snapshot = session.read(path)
    before = path.stat().st_size
    if options.keep is not None:
        snapshot = cut_at(snapshot, options.keep, "--keep")
    done = session.save(path, snapshot, anew=True)
    if not options.quiet:
        output.note(f"{path}: {done.n_bytes:,} bytes, {before - done.n_bytes:,} less than before")
    return 0

"""`kvrt trim`: a session written anew, without what later saves have replaced in it."""

from pathlib import Path

from kvrt import session
from kvrt.cli import output
from kvrt.cli.fork import cut_at
from kvrt.cli.head import existing, n_bytes
from kvrt.cli.session_options import TrimOptions
from kvrt.session import kv_file


def execute(options: TrimOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from being done; the session is as it was then.
    """
    assert options.session is not None
    path = existing(Path(options.session))
    snapshot = session.read(path)
    before = n_bytes(path)
    if options.keep is not None:
        snapshot = cut_at(snapshot, options.keep, "--keep")
    if path.is_dir():
        session.save(path, snapshot)
    else:
        kv_file.save(path, snapshot, anew=True)
    if not options.quiet:
        after = n_bytes(path)
        output.note(f"{path}: {after:,} bytes, {before - after:,} less than before")
    return 0

"""`kvrt fork`: a copy of a session, cut at a token."""

from pathlib import Path

from kvrt import session
from kvrt.cellcache import history as texts
from kvrt.cli.flags.session_files import ForkOptions
from kvrt.cli.process import output
from kvrt.cli.report import phrases
from kvrt.cli.session.open_session import existing
from kvrt.errors import UsageError
from kvrt.session.change import edit, replace
from kvrt.session.snapshot import Snapshot


def execute(options: ForkOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from being done; nothing is written then.
    """
    assert options.session is not None and options.output is not None and options.at is not None
    new = Path(options.output)
    old = session.read(existing(Path(options.session)))
    n = n_tokens(old)
    short = cut_at(old, options.at, "--at")
    done = session.save(new, short, before=replace.refuse_existing)
    if not options.quiet:
        output.note(
            f"{new}: {options.at:,} of {n:,} {phrases.token_noun(n)}, {done.n_bytes:,} bytes"
        )
        note_checkpoints(new, old, short)
    return 0


def note_checkpoints(path: Path, old: Snapshot, new: Snapshot) -> None:
    """Says which context checkpoints a shorter copy lacks."""
    gone = sorted({x.pos for x in old.checkpoints} - {x.pos for x in new.checkpoints})
    if gone:
        output.note(f"{path}: {phrases.checkpoints_left_out(gone)}")


def n_tokens(snapshot: Snapshot) -> int:
    """Tokens of the first sequence."""
    return texts.entries(snapshot.history, min(snapshot.seq_ids, default=0)).shape[1]


def cut_at(snapshot: Snapshot, n: int, flag: str) -> Snapshot:
    """The snapshot with the first n tokens of its first sequence.

    Raises:
      UsageError: it has fewer, or two tokens share the position of the cut.
      CannotRewind: its layers could not resume there.
    """
    seq_id = min(snapshot.seq_ids, default=0)
    pos = texts.positions(snapshot.history, seq_id)
    if n > len(pos):
        raise UsageError(f"{flag} {n}: the session holds {len(pos):,} tokens; give at most as many")
    if n == len(pos):
        return snapshot
    if pos[n] == pos[n - 1]:
        raise UsageError(
            f"{flag} {n}: tokens {n - 1} and {n} share position {pos[n]} and stay together; give "
            "another number"
        )
    return edit.cut(snapshot, seq_id, int(pos[n]))

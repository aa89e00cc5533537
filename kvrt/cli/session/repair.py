"""`kvrt repair`: what is sound of a damaged session, written in its place or as another one."""

from pathlib import Path

from kvrt import session
from kvrt.cli.flags.session_files import RepairOptions
from kvrt.cli.process import output
from kvrt.cli.report.phrases import token_noun
from kvrt.cli.session.open_session import existing, real_path
from kvrt.errors import BadSession, SaveError
from kvrt.session.change import replace
from kvrt.session.change.repair import Repaired, repaired
from kvrt.session.io import container_at
from kvrt.session.kv_file import file as kv_file
from kvrt.session.library import stored

_SHOWN = 8  # damaged parts that are listed


def execute(options: RepairOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      BadSession: nothing of it is proven to be sound; it is as it was.
      KvrtError: what else keeps it from being done; likewise.
    """
    assert options.session is not None
    path = real_path(existing(Path(options.session)))
    new = path if options.output is None else Path(options.output)
    status = stored.status(path)

    def before(at: Path) -> None:
        if new != path:
            replace.refuse_existing(at)
            return
        now = stored.status(path)
        if status is None or now is None or not stored.is_same(status, now):
            raise SaveError(f"{path}: another process has changed it meanwhile; repair it again")
        kept.append(replace.keep_damaged(path))

    kept: list[Path] = []
    found = repaired(path)
    if not found.damage:
        if not options.quiet:
            output.note(f"{path}: sound, there is nothing to repair")
        return 0
    if not found.snapshot.seq_ids:
        raise BadSession(
            f"{path}: {_listed(found.damage)}: no token is left before that; kvrt run --overwrite "
            f"replaces it, and keeps it as {path.name}~"
        )
    if container_at(new) == "folder":
        session.save(new, found.snapshot, before=before)
    else:
        kv_file.save(new, found.snapshot, anew=True, before=before)
    if not options.quiet:
        _report(new, found)
        for at in kept:
            output.note(f"{new}: the damaged session is kept as {at}")
    return 0


def _report(new: Path, found: Repaired) -> None:
    """What was damaged, and what each sequence has lost."""
    n, n_kept = sum(found.n_tokens.values()), sum(found.n_kept.values())
    output.note(f"{new}: {n_kept:,} of {n:,} {token_noun(n)} kept; {_listed(found.damage)}")
    if len(found.n_tokens) == 1:
        return
    lost = {s: n - found.n_kept[s] for s, n in found.n_tokens.items()}
    whole = [s for s, n in lost.items() if not n]
    output.note(f"{new}: {len(whole):,} of {len(lost):,} sequences are whole")
    for s in [s for s, n in lost.items() if n][:_SHOWN]:
        n, n_kept = found.n_tokens[s], found.n_kept[s]
        output.note(f"{new}: sequence {s} has its first {n_kept:,} of {n:,} {token_noun(n)}")


def _listed(damage: tuple[str, ...]) -> str:
    more = f" and {len(damage) - _SHOWN:,} more parts" if len(damage) > _SHOWN else ""
    return f"damaged: {', '.join(damage[:_SHOWN])}{more}"

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
    target = path if options.output is None else Path(options.output)
    status = stored.status(path)

    def before(at: Path) -> None:
        if target != path:
            replace.refuse_existing(at)
            return
        now = stored.status(path)
        if status is None or now is None or not stored.is_same(status, now):
            raise SaveError(f"{path}: another process has changed it meanwhile; repair it again")
        kept.append(replace.keep_damaged(path))

    kept: list[Path] = []
    result = repaired(path)
    if not result.damage:
        if not options.quiet:
            output.note(f"{path}: sound, there is nothing to repair")
        return 0
    if not result.snapshot.seq_ids:
        raise BadSession(
            f"{path}: {_listed(result.damage)}: no token is left before that; kvrt run --overwrite "
            f"replaces it, and keeps it as {path.name}~"
        )
    if container_at(target) == "folder":
        session.save(target, result.snapshot, before=before)
    else:
        kv_file.save(target, result.snapshot, anew=True, before=before)
    if not options.quiet:
        _report(target, result)
        for at in kept:
            output.note(f"{target}: the damaged session is kept as {at}")
    return 0


def _report(target: Path, result: Repaired) -> None:
    """What was damaged, and what each sequence has lost."""
    n, n_kept = sum(result.n_tokens.values()), sum(result.n_kept.values())
    output.note(f"{target}: {n_kept:,} of {n:,} {token_noun(n)} kept; {_listed(result.damage)}")
    if len(result.n_tokens) == 1:
        return
    lost = {s: n - result.n_kept[s] for s, n in result.n_tokens.items()}
    whole = [s for s, n in lost.items() if not n]
    output.note(f"{target}: {len(whole):,} of {len(lost):,} sequences are whole")
    for s in [s for s, n in lost.items() if n][:_SHOWN]:
        n, n_kept = result.n_tokens[s], result.n_kept[s]
        output.note(f"{target}: sequence {s} has its first {n_kept:,} of {n:,} {token_noun(n)}")


def _listed(damage: tuple[str, ...]) -> str:
    more = f" and {len(damage) - _SHOWN:,} more parts" if len(damage) > _SHOWN else ""
    return f"damaged: {', '.join(damage[:_SHOWN])}{more}"

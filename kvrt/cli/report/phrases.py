"""What a plan of reuse means, and nouns for counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrt.options.select import Select
from kvrt.reuse.plan import ReusePlan
from kvrt.reuse.reasons import Reason

if TYPE_CHECKING:
    from kvrt.runtime.session_file import Restored
    from kvrt.session.manifest import Manifest

WHY = {
    Reason.DIFFERS: "differ from the session",
    Reason.NOT_HELD: "not in the session",
    Reason.LAST: "the last token, always recomputed",
    Reason.MOVED: "at positions that were shifted",
    Reason.OTHER_PREFIX: "computed under another prefix, or by sparse reads",
    Reason.SHORT: "in common chunks too short to reuse",
    Reason.CANNOT_RESUME: "windowed or recurrent layers cannot resume there",
    Reason.AFTER_RESUMED: "after the last position that windowed or recurrent layers resume at",
    Reason.OFF: "behind the first difference (see --reuse_chunks)",
}

_MOST_SHOWN = 5  # positions


def why(plan: ReusePlan) -> list[str]:
    """How many tokens are evaluated for each reason, in the order of the text."""
    n: Counter[Reason] = Counter()
    for x in plan.reasons:
        n[x.reason] += x.end - x.start
    return [f"{n[reason]:,} {WHY[reason]}" for reason in n]


def reused(name: str, plan: ReusePlan, seconds: float) -> str:
    """The line of a run: what a session gave, what is evaluated all the same, and why."""
    done = f"{counted(plan.n_reused, 'token')} restored in {seconds:.2f} s"
    rest = f"{plan.n_evaluated:,} recomputed: {'; '.join(why(plan))}"
    exact = "" if plan.n_exact is None else f"; approximate from token {plan.n_exact:,} on"
    return f"{name}: {done}, {rest}{exact}"


def restored(path: Path, found: "Restored") -> str:
    """The line of a run: what a session gave, and what follows."""
    if found.plan is not None:
        return reused(str(path), found.plan, found.seconds)
    n, seconds = found.n_restored - bool(found.after), f"restored in {found.seconds:.2f} s"
    if found.after is not None:
        follows = f", resumed after {found.after.n_sampled:,} sampled tokens"
    elif found.spans:
        follows = f", {len(found.ids) - n:,} follow"
    else:
        return f"{path}: {n:,} tokens {seconds}"
    return f"{path}: {counted(n, 'token')} {seconds}{follows}"


def named_settings(said: Mapping[str, Any]) -> str:
    """What a session says of a policy or of sparse reads, on one line."""
    return " ".join(f"{k}={v}" for k, v in said.items())


def sampled_by(found: "Manifest", seq_id: int, select: Select | None) -> str:
    """What a session's tokens were computed by, where that was sparse reads, and what follows.

    Args:
      found: the session's manifest.
      seq_id: the sequence that is restored.
      select: how those after them are read.
    """
    n_exact = found.exact.get(seq_id)
    if found.select is None or n_exact is None:
        return ""
    there = named_settings(found.select)
    here = "all cells" if select is None else named_settings(select.said)
    here = "as here" if here == there else f"read here: {here}"
    return f"; from token {n_exact:,} on sampled by sparse reads ({there}), {here}"


def counted(n: int, what: str) -> str:
    """A number of things, by the noun for one of them."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def checkpoints_left_out(at: Sequence[int]) -> str:
    """What a shorter copy of a session leaves out."""
    noun = "checkpoint" if len(at) == 1 else "checkpoints"
    return f"without the context {noun} at {shown_positions(at)}, behind its end"


def shown_positions(at: Sequence[int]) -> str:
    """Positions for a reader, at most a few of them."""
    shown = at if len(at) <= _MOST_SHOWN + 1 else at[:_MOST_SHOWN]
    more = f" and {len(at) - len(shown):,} more" if len(shown) < len(at) else ""
    return ", ".join(f"{x:,}" for x in shown) + more


def nan_scores(n: int) -> str:
    """What a summary says of scores that were NaN."""
    return f"{n:,} {'score was' if n == 1 else 'scores were'} NaN: such tokens were evicted first"


def compiled(n: int, seconds: float, n_from_disk: int) -> str:
    """The line of a summary that says what compiling took, and what needed none."""
    disk = ""
    if n_from_disk:
        disk = f", {'all' if n_from_disk == n else f'{n_from_disk} of them'} from the disk"
    return (
        f"compiled   {n} {'program' if n == 1 else 'programs'} in {seconds:.2f} s{disk}, "
        "not counted above"
    )

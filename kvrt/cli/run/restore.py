"""What a prompt takes from a session: a common prefix, all of it, or where sampling was left."""

import dataclasses
import enum

from kvrt import Runtime
from kvrt.cells.edits import Remove, Shift
from kvrt.cli.report import phrases
from kvrt.cli.report.exactness import Approximation, reused_part
from kvrt.cli.run.generation import Reading
from kvrt.cli.session.open_session import restore_first
from kvrt.errors import BadToken, CannotRewind
from kvrt.reuse.plan import ReusePlan, operations, plan_reuse
from kvrt.runtime.generate import After
from kvrt.session import OpenedSession


class Way(enum.Enum):
    """How a prompt stands to the session."""

    COMPARED = "what both begin with is taken"
    APPENDED = "it follows all that is held"
    RESUMED = "none was given: sampling resumes"


@dataclasses.dataclass(frozen=True)
class Restored:
    """What is left to read, and the line that says what was taken."""

    reading: Reading
    line: str


def restore_usable(
    runtime: Runtime, opened: OpenedSession, ids: list[int], way: Way, *, chunks: bool
) -> Restored:
    """Restores a session into an empty runtime, as far as it serves.

    Args:
      runtime: gets it as its sequence 0.
      opened: of the session.
      ids: all tokens of the prompt; those that are held as well, whatever the way.
      way: how they stand to the session.
      chunks: cached keys and values that were computed under another text may be used.

    Raises:
      SessionMismatch: the session is of another model or cache.
      BadSession: it is damaged.
    """
    seconds = restore_first(runtime, opened)
    inexact = reused_part(runtime.n_exact(), "session")
    if way is Way.RESUMED and opened.draw is not None and opened.draw.token is not None:
        after = After(token=opened.draw.token, n_sampled=opened.draw.n_drawn)
        return _left_off(opened, ids, after, seconds, inexact)
    n_held = len(opened.held[1])
    if way is Way.APPENDED or _goes_on(runtime, ids):
        line = f"{n_held:,} {phrases.token_noun(n_held)} restored in {seconds:.2f} s"
        spans = [(n_held, len(ids))]
        reading = Reading(ids=ids, n_restored=n_held, spans=spans, reused=inexact)
        return Restored(reading, f"{opened.path}: {line}, {len(ids) - n_held:,} follow")
    if _is_whole(runtime, ids):
        line = f"{opened.path}: {len(ids):,} tokens restored in {seconds:.2f} s"
        return Restored(Reading(ids=ids, n_restored=len(ids)), line)
    at, n_exact = runtime.resume_positions(), runtime.n_exact()
    plan = plan_reuse(runtime.token_history(), ids, chunks=chunks, at=at, n_exact=n_exact)
    spans, inexact = _apply(plan, runtime), reused_part(plan.n_exact, "reuse_chunks")
    reading = Reading(ids=ids, n_restored=plan.n_reused, spans=spans, reused=inexact)
    return Restored(reading, phrases.reused(str(opened.path), plan, seconds))


def _left_off(
    opened: OpenedSession,
    ids: list[int],
    after: After,
    seconds: float,
    inexact: Approximation | None,
) -> Restored:
    """All is restored; the newest token is fed by what samples the next."""
    n = len(ids) - 1
    line = f"{opened.path}: {n:,} {phrases.token_noun(n)} restored in {seconds:.2f} s, "
    line += f"resumed after {after.n_sampled:,} sampled tokens"
    return Restored(Reading(ids=ids, n_restored=len(ids), after=after, reused=inexact), line)


def _apply(plan: ReusePlan, runtime: Runtime) -> list[tuple[int, int]]:
    """Removes and moves what a plan says; returns what is left to evaluate."""
    spans = []
    for op in operations(plan):
        if isinstance(op, Remove):
            runtime.seq_rm(0, op.p0, op.p1)
        elif isinstance(op, Shift):
            runtime.to_cells(0)  # in blocks no position could move
            runtime.seq_add(0, op.p0, op.p1, op.d)
        else:
            spans.append((op.start, op.end))
    return spans


def _is_whole(runtime: Runtime, ids: list[int]) -> bool:
    """Whether a runtime holds just this prompt, cannot go back in it, and need not."""
    pos, held = runtime.token_history()
    if held.tolist() != ids or runtime.n_exact() is not None:
        return False
    if len(ids) - 1 in runtime.resume_positions() or pos[-1] != len(ids) - 1:
        return False
    try:
        runtime.last_logits(0)
    except (BadToken, CannotRewind):
        return False
    return True


def _goes_on(runtime: Runtime, ids: list[int]) -> bool:
    """Whether a prompt follows all that is held where SelfExtend has moved positions.

    It cannot be cut, for positions no longer count tokens, but what follows it follows it.
    """
    extend = runtime.config.self_extend
    held = runtime.token_history()[1].tolist()
    if extend is None or extend.kind != "cache" or not held:
        return False
    return len(held) < len(ids) and ids[: len(held)] == held

"""Requests that wait for a prefix which one that runs is about to compute."""

from collections.abc import Sequence

from kvrt.serving.request import SeqState
from kvrt.serving.scheduling.step_plan import Rules


def gains_by_waiting(state: SeqState, n_hit: int, busy: Sequence[SeqState], rules: Rules) -> bool:
    """Whether one who computes a prompt will soon hold more of this one's than is held now.

    Args:
      state: who waits; `awaits` is set.
      n_hit: tokens of it that are held now.
      busy: those who compute prompts.
      rules: of the scheduler.
    """
    request = state.request
    n = n_hit + rules.n_alike
    if not (rules.holds_back and request.cache and n < len(state.tokens)):
        return False
    start = request.text[: 4 * n]
    # Nobody finds what SelfExtend will move, and such a request finds its first window at most.
    for other in busy if state.extend is None else ():
        if other.extend is not None:
            continue
        text, salt = other.request.text, other.request.salt
        if len(start) == 4 * n and other.n_computed < n and salt == request.salt:
            if text.startswith(start):
                state.awaits = (other, n)
                return True
    return False


def is_awaiting(state: SeqState) -> bool:
    """Whether what it waits for is still being computed."""
    if state.awaits is None:
        return False
    other, n = state.awaits
    if other.seq_id is not None and other.n_computed < n:
        return True
    state.awaits = None
    return False

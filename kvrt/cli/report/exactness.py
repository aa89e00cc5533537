"""Ways in which an answer is not that of the whole text, each with the first token it concerns."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvrt.options.cache import CacheConfig
from kvrt.policies import ScoredPolicy, policy_name
from kvrt.policies.schedule import n_first
from kvrt.policies.self_extend import extend_schedule

# What `Approximation.by` means, for people; a policy by score says its own.
_SAID = {
    "session": "the session's tokens were moved, blended or sampled by sparse reads",
    "reuse_chunks": "chunks were computed under another prefix",
    "chunks": "chunks were computed alone and blended",
    "modules": "modules have not seen each other",
    "self_extend": "tokens share positions",
    "quest": "each sampled token reads some cells",
    "double_sparsity": "each sampled token reads some cells",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Approximation:
    """One reason why an answer is not that of the whole text.

    Attributes:
      by: a policy or a kind of sparse reads as flags name it, or what was reused.
      from_token: the first token, counted from 0 through prompt and answer, that was computed
        without the whole text before it.
      n_dropped: tokens that a policy by position dropped.
      states: whether states of recurrent layers have those all the same.
    """

    by: str
    from_token: int
    n_dropped: int = 0
    states: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object."""
        dropped = {"n_dropped": self.n_dropped} if self.n_dropped else {}
        kept = {"on_states": "keep"} if self.states else {}
        return {"by": self.by, "from_token": self.from_token, **dropped, **kept}

    @property
    def line(self) -> str:
        """The reason for people."""
        said = _SAID.get(self.by, "each kv head keeps some tokens")
        if self.n_dropped:
            said = f"{self.n_dropped:,} older tokens were dropped"
            said += ", recurrent states keep them" if self.states else ""
        return f"approximate from token {self.from_token:,} on: {said} ({self.by})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """Tokens of a prompt and its answer, as far as they decide how exact it is.

    Attributes:
      n_prompt: tokens of the prompt.
      n_computed: tokens that were computed or restored, those of the answer included.
      n_restored: tokens of the prompt that were restored.
      n_compressed: tokens of a prompt that was read whole before a policy by score kept some.
      drop: what a policy by position dropped, None if nothing.
      reused: tokens at the beginning as exact as computed in one go, where others were reused.
    """

    n_prompt: int
    n_computed: int
    n_restored: int = 0
    n_compressed: int = 0
    drop: Approximation | None = None
    reused: Approximation | None = None


def reused_part(n_exact: int | None, by: str) -> Approximation | None:
    """What was reused and is not as computed in one go; `n_exact` is as in `Runtime.n_exact`."""
    return None if n_exact is None else Approximation(by=by, from_token=n_exact)


def approximations(
    counts: AnswerCounts, config: CacheConfig, scored: ScoredPolicy | None
) -> list[Approximation]:
    """All reasons why an answer is not that of the whole text; none where it is.

    Args:
      counts: of the answer.
      config: of its cache.
      scored: the policy by score, None without one.
    """
    n = counts.n_computed
    found = [x for x in (counts.reused, counts.drop) if x is not None and x.from_token < n]
    if scored is not None:
        first = max(scored.n_whole, counts.n_compressed)
        found.append(Approximation(by=policy_name(scored), from_token=first))
    extend, select = config.self_extend, config.select
    if extend is not None and extend.ga_n > 1:
        first = extend.ga_w
        if (schedule := extend_schedule(config)) is not None and not counts.n_restored:
            first = n_first(schedule, counts.n_prompt)
        found.append(Approximation(by="self_extend", from_token=first))
    if select is not None:
        # Prompts read all, and so does a token behind no more cells than it may choose.
        first = max(counts.n_prompt, select.n_cells + 1)
        found.append(Approximation(by=select.name, from_token=first))
    return sorted((x for x in found if x.from_token < n), key=lambda x: x.from_token)


def exactness_fields(found: Sequence[Approximation]) -> dict[str, Any]:
    """The JSON fields that say so."""
    return {"approximate": bool(found), "approximations": [x.fields for x in found]}


def exactness_lines(found: Sequence[Approximation]) -> list[str]:
    """The lines of a summary that say so; none where the answer is that of the whole text."""
    heads = ["exactness  ", *[" " * 11] * len(found)]
    return [f"{head}{x.line}" for head, x in zip(heads, found, strict=False)]

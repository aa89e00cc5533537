"""Beam searches of requests that are being served: each beam is a sample that the engine runs.

A search has its room from its admission on (`SeqState.n_reserved`, `n_ahead`), so that its beams
always run together and none is preempted. After a step the beams that nothing continues are
released, those that several texts continue are forked, and only then do tokens follow.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from kvrt.arrays import Array, Float, Int32
from kvrt.errors import BadRequest
from kvrt.program.sample import NO_TOKEN
from kvrt.serving.beams.search import BeamSearch
from kvrt.serving.outputs import bad_logits
from kvrt.serving.request import FinishReason, Request, SeqState
from kvrt.serving.scheduling.scheduler import Scheduler

Sampled = tuple[SeqState, int]  # a sample, and the token that was sampled for it


@runtime_checkable
class BestTokens(Protocol):
    """The device, as a search sees it."""

    def best_tokens(
        self, logits: Float[Array, "S V"], rows: Sequence[int], n_best: int
    ) -> tuple[Int32[np.ndarray, "n K"], Float[np.ndarray, "n K"]]:
        """The n_best most probable tokens of some rows of logits, and their log-probabilities."""
        ...


class _Running:
    """A search, and the samples that are its beams, best first."""

    def __init__(self, leader: SeqState):
        """The prompt alone."""
        self.search = BeamSearch(leader.request.beams)
        self.leader, self.states = leader, [leader]


class RunningBeams:
    """All searches of an engine.

    Attributes:
      searches: by the id of their request.
      n_forks: beams that were forked so far.
    """

    def __init__(self, scheduler: Scheduler, device: BestTokens) -> None:
        """None is there."""
        self._scheduler, self._device = scheduler, device
        self.searches: dict[str, _Running] = {}
        self.n_forks = 0

    def add(self, state: SeqState) -> None:
        """Takes note of a new sample, if it is the first beam of a search."""
        if state.request.num_beams > 1:
            self.searches[state.request.id] = _Running(state)

    def check_no_search(self, request_id: str, sample: int | None) -> None:
        """Refuses what is about one beam of a search; raises BadRequest."""
        if sample is not None and request_id in self.searches:
            raise BadRequest(
                f"request {request_id!r} is a beam search, whose beams stand and fall together; "
                "cancel it as a whole, or wait for its texts"
            )

    def advance(
        self, sampled: Iterable[Sampled], logits: Float[Array, "S V"]
    ) -> tuple[list[Sampled], list[SeqState]]:
        """Takes the step of every search whose beams have run.

        Args:
          sampled: by row of the logits, its sample and the most probable token.
          logits: of the step that ran.

        Returns:
          Those of other requests; and of each search that ended its texts, as samples that ended.
        """
        others: list[Sampled] = []
        mine: dict[str, dict[SeqState, int]] = {}
        ended: list[SeqState] = []
        for row, (state, token) in enumerate(sampled):
            if state.request.num_beams == 1:
                others.append((state, token))
            elif token != NO_TOKEN:
                mine.setdefault(state.request.id, {})[state] = row
            elif state.request.id in self.searches:
                ended += self._fail(state)
        for name, rows in mine.items():
            if name in self.searches:
                ended += self._step(self.searches[name], rows, logits)
        return others, ended

    def ended(self, states: Sequence[SeqState]) -> list[SeqState]:
        """Samples that ended otherwise, as they are reported: of a search n, whatever its beams."""
        out = [s for s in states if s.request.num_beams == 1]
        searches = {s.request.id: s for s in states if s.request.num_beams > 1}
        for name, state in searches.items():
            del self.searches[name]
            assert state.finish_reason is not None, "it ended"
            out += [_closed(state, i, (), state.finish_reason) for i in range(state.request.n)]
        return out

    def _step(
        self, running: _Running, rows: dict[SeqState, int], logits: Float[Array, "S V"]
    ) -> list[SeqState]:
        """One step of a search; its texts where it ends."""
        assert len(rows) == len(running.states), "the beams of a search run together"
        search = running.search
        at = [rows[state] for state in running.states]
        ids, log_probs = self._device.best_tokens(logits, at, search.spec.n_candidates)
        chosen = search.advance(ids.tolist(), log_probs.tolist())
        if search.is_done:
            return self._finish(running)
        states, continued = running.states, {beam for beam, _ in chosen}
        for beam, state in enumerate(states):
            if beam not in continued:
                self._scheduler.finish(state, "cancelled", kept=False)
        taken = {states[beam].sample for beam in continued}
        numbers = (i for i in range(len(chosen)) if i not in taken)
        running.states = []
        for beam, _ in chosen:
            src = states[beam]
            goes_on = src not in running.states
            running.states.append(src if goes_on else self._fork(src, next(numbers)))
        for state, (_, token) in zip(running.states, chosen, strict=True):
            state.tokens.append(token)
        return []

    def _fork(self, src: SeqState, sample: int) -> SeqState:
        dst = src.forked(src.request, sample)
        n = self._scheduler.fork(src, dst)
        assert n, "a search has the room of all its beams"
        self.n_forks += 1
        return dst

    def _finish(self, running: _Running) -> list[SeqState]:
        """Ends a search; the beam that has most of its best text may be found by others."""
        request, found = running.leader.request, running.search.hypotheses
        best = (*request.tokens, *found[0].tokens)
        nearest = max(running.states, key=lambda s: _n_same(s.tokens, best))
        texts = [
            _closed(nearest, i, h.tokens, "stop" if h.stopped else "length", h.score)
            for i, h in enumerate(found[: request.n])
        ]
        for state in texts:
            state.n_cached = running.leader.n_cached
        for state in running.states:
            self._scheduler.finish(state, "cancelled", kept=state is nearest)
        del self.searches[request.id]
        return texts

    def _fail(self, state: SeqState) -> list[SeqState]:
        """Ends a search one of whose beams has no next token."""
        running = self.searches.pop(state.request.id)
        error = bad_logits(state)
        for beam in running.states:
            self._scheduler.finish(beam, "error", error, damaged=True)
        return [_closed(state, i, (), "error") for i in range(state.request.n)]


def _closed(
    state: SeqState,
    sample: int,
    tokens: tuple[int, ...],
    reason: FinishReason,
    score: float | None = None,
) -> SeqState:
    """A sample that ended, with these sampled tokens, in place of beams."""
    request: Request = state.request
    whole = [*request.tokens, *tokens]
    out = SeqState(request=request, sample=sample, tokens=whole, schedule=state.schedule)
    out.n_cached, out.n_gone, out.score = state.n_cached, state.n_gone, score
    out.n_before_drop = state.n_before_drop
    out.close(reason, state.error)
    return out


def _n_same(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens at the beginning that two texts share."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)

"""The scheduler: which tokens of which requests the next step computes.

Continuous batching under one budget of tokens a step. Those who decode come first, a token each;
then prompts that are being computed, in chunks; then those who wait, in order. When there is no
room for one who runs, the last one let in gives its row up (by priority: the worst one), and goes
back to the head of the queue with its tokens; in such a step nobody is let in. So whoever came
first always gets on, and every request ends.

    plan = scheduler.plan()     # what to compute; states are as they were
    ...                         # the step runs
    scheduler.ran(plan)         # its tokens are in the cache; samples of one prompt are forked
    state.take(token)           # those of plan.ending, and forks; finish(state, why) where it ends

Pure host code that knows nothing of the device, so it can be driven by a clock of any kind; the
same calls give the same plans.

Source: continuous batching, Orca (OSDI 2022); chunked prefill, arXiv:2308.16369; preemption,
arXiv:2309.06180, sec. 4.5.
"""

from collections.abc import Mapping, Sequence

from kvrt.errors import BadConfig, BadRequest
from kvrt.serving.cache.base import Space
from kvrt.serving.queue import Waiting
from kvrt.serving.request import FinishReason, State
from kvrt.serving.roster import Roster
from kvrt.serving.step_plan import Rules, StepPlan

# Times that a request may find no room although it is alone, before it is given up.
_N_STUCK = 8
# Tokens, doubled each time it lost its row, that must fit beyond the text of one that comes back.
_MARGIN = 16
# Requests beyond the free rows that the cache is asked about in a step: it takes time.
_N_ASKED = 16


class Scheduler:
    """Decides what each step computes, and who has a row.

    Args:
      space: the cache.
      rules: how to decide.

    Raises:
      BadConfig: a step could not hold one token of every row.
    """

    def __init__(self, space: Space, rules: Rules) -> None:
        """Starts with nobody."""
        if rules.n_batch < space.n_rows:
            raise BadConfig(
                f"n_batch is {rules.n_batch}, below the {space.n_rows} sequences that may decode "
                "at once; raise it or lower n_seq_max"
            )
        self._space, self._rules = space, rules
        alike = rules.n_alike if rules.by_prefix else None
        self._roster = Roster(Waiting(rules.order, rules.n_wait, alike))
        self._n_steps = 0
        # Who waits until another one has computed so many tokens.
        self._awaited: dict[State, tuple[State, int]] = {}

    @property
    def live(self) -> Mapping[str, Sequence[State]]:
        """Samples that have not ended, by the id of their request."""
        return self._roster.live

    @property
    def running(self) -> Sequence[State]:
        """Samples that have a row, in the order in which they got it."""
        return self._roster.running

    @property
    def n_waiting(self) -> int:
        """Samples that have not ended and have no row."""
        return sum(map(len, self._roster.live.values())) - len(self._roster.running)

    def add(self, state: State) -> None:
        """Lets a sample wait; the samples of one request follow the first of them.

        Raises:
          BadRequest: the id or the sample is here already, or it can never fit.
        """
        n, n_max = state.request.n_whole, self._space.n_max
        if n > n_max:
            raise BadRequest(
                f"{state.request.name} needs room for {n} tokens, the cache holds {n_max} of one "
                "request; shorten it or raise n_ctx"
            )
        self._roster.add(state, self._n_steps)

    def cancel(self, request_id: str, sample: int | None = None) -> list[State]:
        """Ends a sample of a request, or all of them; those that it ended.

        Raises:
          BadRequest: nothing of that is being served.
        """
        live = self._roster.live.get(request_id, [])
        ended = [s for s in live if sample in (None, s.sample)]
        if not ended:
            what = f"request {request_id!r}" + ("" if sample is None else f", sample {sample},")
            raise BadRequest(f"{what} is not being served; it ended or never came")
        for state in ended:
            self.finish(state, "cancelled")
        return ended

    def finish(self, state: State, reason: FinishReason) -> None:
        """Ends a sample and takes its row back."""
        if state.row is not None:
            self._space.release(state.row, state)
        self._roster.end(state)
        self._awaited.pop(state, None)
        state.finish_reason = reason

    def plan(self) -> StepPlan:
        """What the next step computes; rows and room for it are taken, states are as they were.

        A plan without tokens while somebody is live means that all wait for a tier.
        """
        self._n_steps += 1
        self._roster.waiting.n_steps = self._n_steps
        plan = StepPlan(n_left=self._rules.n_batch)
        self._plan_prompts(plan, self._plan_decodes(plan))
        self._plan_forks(plan)
        if not plan.preempted:
            self._let_in(plan)
        self._stretch(plan)
        self._plan_forks(plan)
        return plan

    def ran(self, plan: StepPlan) -> None:
        """A planned step ran: its tokens are in the cache, and samples of one prompt part."""
        for state in plan.decode:
            state.n_computed += 1
        for state, start, n in plan.prompts:
            state.n_computed = start + n
        for src, dst in plan.forks:
            if src.row is not None and self._space.fork(src, dst, src.n_prompt):
                self._roster.followers[src].remove(dst)
                dst.n_computed = dst.n_cached = src.n_prompt
                self._seat(dst)
        for leader in [s for s in self._roster.followers if s.n_computed >= s.n_prompt]:
            self._roster.part(leader)

    def _plan_decodes(self, plan: StepPlan) -> list[State]:
        """Plans a token of everybody who decodes; returns those with more to compute."""
        prompts, decode = [], plan.decode
        for state in tuple(self._roster.running):
            n = state.n_computed + 1
            if n < len(state.tokens):
                prompts.append(state)
            elif n == len(state.tokens) and state.row is not None:
                # One that has drawn nothing yet since its last step has nothing to compute.
                if n <= state.capacity or self._grow(state, n, plan):
                    decode.append(state)
                    plan.n_left -= 1
        return prompts

    def _plan_prompts(self, plan: StepPlan, prompts: list[State]) -> None:
        if self._rules.order == "priority":
            prompts.sort(key=self._roster.waiting.worth)
        for state in prompts:
            if state.row is None or plan.n_left == 0:
                continue
            n = self._chunk(state, state.n_computed, plan)
            if self._grow(state, state.n_computed + n, plan):
                plan.compute(state, n)

    def _chunk(self, state: State, start: int, plan: StepPlan) -> int:
        n = min(len(state.tokens) - start, plan.n_left, self._rules.n_chunk or plan.n_left)
        return self._space.cut(state, start, n)

    def _grow(self, state: State, n: int, plan: StepPlan) -> bool:
        """Makes room for n tokens of a state, if need be by taking rows; False if its own went."""
        row = state.row
        assert row is not None
        while n > state.capacity and not self._space.grow(row, n, state.n_computed):
            victim = self._roster.victim(self._rules.order)
            if victim is state and len(self._roster.running) == 1 and self._is_stuck(state, plan):
                return False
            self._preempt(victim, plan)
            if victim is state:
                return False
        state.capacity = self._space.capacity(row)
        return True

    def _preempt(self, state: State, plan: StepPlan) -> None:
        row = state.row
        assert row is not None
        if self._rules.preempt == "swap" and self._space.park(row, state):
            plan.parked.append(state)
        else:
            self._space.release(row, state)
        self._roster.send_back(state)
        plan.drop(state)
        plan.preempted.append(state)

    def _let_in(self, plan: StepPlan) -> None:
        """Gives rows to those who wait, in order, until something is used up."""
        n_free = self._n_free_rows(plan)
        if plan.n_left == 0 or n_free <= 0:
            return
        n_asked = n_free + _N_ASKED
        busy = [s for s in self._roster.running if s.n_computed < s.n_prompt]
        for state in self._roster.waiting.first(2 * self._space.n_rows):
            if plan.n_left == 0 or self._n_free_rows(plan) <= 0 or n_asked == 0:
                return
            if self._is_awaiting(state):
                continue
            n_asked -= 1
            found = self._space.hit(state)
            if found is None or self._gains_by_waiting(state, found, busy):
                continue
            n_tokens = found + self._chunk(state, found, plan)
            found = self._space.admit(state, n_tokens, self._whole(state))
            if found is None:
                if not self._roster.running:
                    self._is_stuck(state, plan)
                return
            state.n_computed = found
            state.n_cached = found if state.n_cached is None else state.n_cached
            self._roster.waiting.remove(state)
            self._seat(state)
            plan.admitted.append(state)
            busy.append(state)
            n = min(n_tokens - found, plan.n_left)
            plan.compute(state, self._space.cut(state, found, n))
            self._plan_forks(plan)

    def _seat(self, state: State) -> None:
        assert state.row is not None
        state.capacity = self._space.capacity(state.row)
        self._roster.seat(state)

    def _whole(self, state: State) -> int | None:
        """What must fit; the more often one lost its row, the more, or it would lose it at once."""
        if self._rules.admit == "whole":
            return state.n_whole
        if state.n_preempted:
            return min(state.n_whole, len(state.tokens) + (_MARGIN << min(state.n_preempted, 24)))
        return None if self._rules.admit == "chunk" else len(state.tokens)

    def _n_free_rows(self, plan: StepPlan) -> int:
        return self._space.n_rows - len(self._roster.running) - len(plan.forks)

    def _gains_by_waiting(self, state: State, found: int, busy: list[State]) -> bool:
        """Whether one who computes a prompt will soon hold more of this one's than is found."""
        request = state.request
        n = found + self._rules.n_alike
        if not (self._rules.by_prefix and request.cache and n < len(state.tokens)):
            return False
        start = request.text[: 4 * n]
        for other in busy:
            text, salt = other.request.text, other.request.salt
            if len(start) == 4 * n and other.n_computed < n and salt == request.salt:
                if text.startswith(start):
                    self._awaited[state] = (other, n)
                    return True
        return False

    def _is_awaiting(self, state: State) -> bool:
        """Whether what it waits for is still being computed."""
        other, n = self._awaited.get(state, (state, 0))
        if other.row is not None and other.n_computed < n:
            return True
        self._awaited.pop(state, None)
        return False

    def _plan_forks(self, plan: StepPlan) -> None:
        followers = self._roster.followers
        if not followers:
            return
        ending, parted = set(plan.ending), {src for src, _ in plan.forks}
        for leader, follow in followers.items():
            if leader in ending and leader not in parted:
                plan.forks += [(leader, dst) for dst in follow[: self._n_free_rows(plan)]]

    def _stretch(self, plan: StepPlan) -> None:
        """Gives what is left of the budget to the first prompts, beyond their n_chunk."""
        if self._rules.n_chunk is None:
            return
        for i, (state, start, n) in enumerate(plan.prompts):
            more = min(len(state.tokens) - start - n, plan.n_left)
            longer = self._space.cut(state, start, n + more) if more > 0 else n
            if longer > n and self._fits(state, start + longer):
                plan.prompts[i] = (state, start, longer)
                plan.n_left -= longer - n

    def _fits(self, state: State, n: int) -> bool:
        """Makes room for n tokens of a state, if there is some."""
        assert state.row is not None
        if n > state.capacity and not self._space.grow(state.row, n, state.n_computed):
            return False
        state.capacity = self._space.capacity(state.row)
        return True

    def _is_stuck(self, state: State, plan: StepPlan) -> bool:
        """Ends a sample that finds no room again and again although it is alone."""
        state.n_stuck += 1
        if state.n_stuck < _N_STUCK:
            return False
        state.error = (
            f"{state.request.name} has {len(state.tokens)} tokens, for which there is no room in "
            "the cache although no other request runs; shorten it or raise n_ctx"
        )
        self.finish(state, "error")
        plan.refused.append(state)
        return True

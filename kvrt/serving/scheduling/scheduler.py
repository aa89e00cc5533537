"""The scheduler: which tokens of which requests the next step computes.

Continuous batching under one budget of tokens a step. Those who decode come first, a token each;
then prompts that are being computed, in chunks; then those who wait, in order. When there is no
room for one who runs, the last one admitted is preempted (by priority: the worst one), and goes
back to the head of the queue with its tokens; in such a step nobody is admitted. So whoever came
first always gets on, and every request ends.

A request whose policy will drop tokens is admitted when all the room of its context is free, and
keeps that to its end: it never asks for more. Once tokens were dropped it is not preempted, for
what saw them cannot be computed again; the others wait for its end. SelfExtend in the cache moves
positions and drops nothing: such a request asks for room as others do, and its rounds come at the
same tokens when it is computed again.

    plan = scheduler.plan()     # what to compute; states are as they were
    ...                         # the step runs
    scheduler.ran(plan)         # its tokens are in the cache; samples of one prompt are forked
    state.append(token)         # those of plan.ending, and forks; finish(state, why) where it ends

A request ends in one place, `finish`, whatever the reason.

Pure host code that knows nothing of the device, so it can be driven by a clock of any kind; the
same calls give the same plans.

Source: continuous batching, Orca (OSDI 2022); chunked prefill, arXiv:2308.16369; preemption,
arXiv:2309.06180, sec. 4.5.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvrt.errors import BadConfig, BadRequest, CacheFull
from kvrt.options.serving import Rules
from kvrt.serving.cache.base import SchedulerSpace
from kvrt.serving.request import FinishReason, SeqState
from kvrt.serving.scheduling.live_requests import LiveRequests
from kvrt.serving.scheduling.queue import WaitingQueue
from kvrt.serving.scheduling.step_plan import StepPlan

# Times that a request may find no room although it is alone, before it ends with an error.
_N_STUCK = 8
# Tokens, doubled at each preemption, that must fit beyond those of a request that is resumed.
_MARGIN = 16
# Requests beyond the free sequences that the cache is asked about in a step: it takes time.
_N_ASKED = 16


class Scheduler:
    """Decides what each step computes, and who runs.

    Args:
      space: the cache.
      rules: how to decide.

    Raises:
      BadConfig: a step could not hold one token of every sequence.
    """

    def __init__(self, space: SchedulerSpace, rules: Rules) -> None:
        """Starts with nobody."""
        if rules.n_batch < space.n_seq_max:
            raise BadConfig(
                f"n_batch is {rules.n_batch}, below the {space.n_seq_max} sequences that may "
                "decode at once; raise it or lower n_seq_max"
            )
        self._space, self._rules = space, rules
        n_alike = rules.n_alike if rules.holds_back else None
        self._queue = WaitingQueue(rules.order, rules.n_wait, n_alike)
        self._requests = LiveRequests(self._queue)
        self._n_steps = 0

    @property
    def live(self) -> Mapping[str, Sequence[SeqState]]:
        """Samples that have not ended, by the id of their request."""
        return self._requests.live

    @property
    def running(self) -> Sequence[SeqState]:
        """Samples that run, in the order in which they were admitted."""
        return self._requests.running

    @property
    def n_waiting(self) -> int:
        """Samples that have not ended and do not run."""
        return sum(map(len, self._requests.live.values())) - len(self._requests.running)

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits, and there is a sequence number."""
        return len(self.running) < self._space.n_seq_max and self.n_waiting > 0

    def find(
        self, request_id: str, sample: int, remedy: str = "it ended or never came"
    ) -> SeqState:
        """A sample that has not ended.

        Raises:
          BadRequest: it is not being served, which ends with the remedy.
        """
        for state in self._requests.live.get(request_id, ()):
            if state.sample == sample:
                return state
        raise BadRequest(f"request {request_id!r}, sample {sample}, is not being served; {remedy}")

    def add(self, state: SeqState) -> None:
        """Lets a sample wait; the samples of one request follow the first of them.

        Raises:
          BadRequest: the id or the sample is here already, or it can never fit.
        """
        n, n_max = state.n_whole, self._space.n_max
        if n > n_max:
            raise BadRequest(
                f"{state.request.name} needs room for {n} tokens, the cache holds {n_max} of one "
                "request; shorten it or raise n_ctx"
            )
        if state.n_reserved and not self._space.holds(state):
            n_samples = state.n_ahead + 1
            raise BadRequest(
                f"{state.request.name} reserves room for {n_samples} x {state.n_reserved} tokens, "
                f"the cache has {self._space.n_seq_max} sequences and too little room; ask for "
                "less, or raise n_ctx or n_seq_max"
            )
        self._requests.add(state, self._n_steps)

    def fork(self, src: SeqState, dst: SeqState) -> int:
        """Takes in a sample with the same tokens as another one; those of it that both have now.

        It runs from now on; where that one waits, or there is no room, it waits and is recomputed.

        Raises:
          BadRequest: the id is here already.
          CacheFull: there is no room, and it cannot be computed again, since tokens were dropped,
            or it reads some cells.
        """
        self._requests.check_new(dst)
        n = src.n_computed - src.n_past_read
        if n and self._space.fork(src, dst, n):
            self._requests.take_in(dst, self._n_steps)
            self._begin(dst, src, n)
            return n
        if src.n_dropped or (src.reads_sparsely and src.n_sampled):
            why = f"dropped {src.n_dropped} tokens" if src.n_dropped else "reads some cells"
            raise CacheFull(
                f"{src.request.name} cannot be forked now: it {why}, so that a fork has to begin "
                "with all of its cells, and there is no room for them; fork it once another "
                "request has ended, or raise n_ctx or n_seq_max"
            )
        self._requests.add(dst, self._n_steps)
        return 0

    def cancel(
        self, request_id: str, sample: int | None = None, reason: FinishReason = "cancelled"
    ) -> list[SeqState]:
        """Ends a sample of a request, or all of them, for a reason; those that it ended.

        Raises:
          BadRequest: nothing of that is being served.
        """
        ended = [s for s in self.live.get(request_id, ()) if sample in (None, s.sample)]
        if not ended:
            what = f"request {request_id!r}" + ("" if sample is None else f", sample {sample},")
            raise BadRequest(f"{what} is not being served; it ended or never came")
        for state in ended:
            self.finish(state, reason)
        return ended

    def finish(
        self,
        state: SeqState,
        reason: FinishReason,
        error: str | None = None,
        *,
        damaged: bool = False,
        kept: bool = True,
    ) -> None:
        """Ends a sample, whatever the reason: its place, its room and what was kept for it.

        Args:
          state: a sample that has not ended.
          reason: why it ends.
          error: what went wrong, one line.
          damaged: what it computed is not sound, and nobody may find it.
          kept: whether what it computed is worth to be kept for others.
        """
        if state.seq_id is not None:
            self._space.release(state, damaged=damaged, kept=kept)
        self._requests.remove(state)
        state.close(reason, error)

    def plan(self) -> StepPlan:
        """What the next step computes; room for it is taken, states are as they were.

        A plan without tokens while somebody is live means that all wait for a tier.
        """
        self._n_steps += 1
        self._queue.n_steps = self._n_steps
        plan = StepPlan(n_left=self._rules.n_batch)
        if prompts := self._plan_decodes(plan):
            self._plan_prompts(plan, prompts)
        self._plan_forks(plan)
        if self._queue.waiting and not plan.preempted:
            self._admit(plan)
        if self._rules.n_chunk is not None:
            self._stretch(plan)
        self._plan_forks(plan)
        return plan

    def ran(self, plan: StepPlan) -> None:
        """A planned step ran: its tokens are in the cache, and samples of one prompt fork."""
        for state in plan.decode:
            state.n_computed += 1
        for state, start, n in plan.prompts:
            state.n_computed = start + n
        for src, dst in plan.forks:
            if src.seq_id is not None and self._space.fork(src, dst, src.n_prompt):
                assert src.followers is not None, "a sample that is forked leads"
                src.followers.remove(dst)
                self._begin(dst, src, src.n_prompt)
        for leader in [s for s in self._requests.leaders if s.n_computed >= s.n_prompt]:
            self._requests.release_followers(leader)

    def _plan_decodes(self, plan: StepPlan) -> list[SeqState]:
        """Plans a token of everybody who decodes; returns those with more to compute."""
        prompts, decode = [], []
        for state in self._requests.running:
            n, n_tokens = state.n_computed + 1, len(state.tokens)
            if state.n_until == state.n_computed and n <= n_tokens:
                self._move(state, plan)
            if n < n_tokens:
                prompts.append(state)
            elif n == n_tokens < state.n_most:
                # One that has sampled nothing since its last step has nothing to compute, nor has
                # one whose last token is being sampled.
                decode.append(state)
        if not self._space.grow_by_one([s for s in decode if s.capacity <= s.n_computed]):
            # One by one, for somebody has to go.
            for state in decode:
                if state.seq_id is not None and self._grow(state, state.n_computed + 1, plan):
                    plan.compute(state, 1)
            return [s for s in prompts if s.seq_id is not None]
        plan.decode += decode
        plan.n_left -= len(decode)
        return prompts

    def _plan_prompts(self, plan: StepPlan, prompts: list[SeqState]) -> None:
        if self._rules.order == "priority":
            prompts.sort(key=self._queue.rank)
        for state in prompts:
            if state.seq_id is None or plan.n_left == 0:
                continue
            n = self._chunk(state, state.n_computed, plan)
            if self._grow(state, state.n_computed + n, plan):
                plan.compute(state, n)

    def _chunk(self, state: SeqState, start: int, plan: StepPlan) -> int:
        n = min(state.n_next(start), plan.n_left, self._rules.n_chunk or plan.n_left)
        return self._space.chunk(state, start, n)

    def _move(self, state: SeqState, plan: StepPlan) -> None:
        """Applies the edits that are due before a sample goes on."""
        assert state.schedule is not None, "without one nothing is ever due"
        due = state.schedule.due(state.counts)
        state.n_until = due.n_until
        self._space.edit(state, due.edits)
        if due.edits:
            plan.edited.append((state, state.n_past, due))
        if due.drops and state.n_before_drop is None:
            state.n_before_drop = state.n_computed
        state.n_gone += due.n_gone

    def _grow(self, state: SeqState, n: int, plan: StepPlan) -> bool:
        """Makes room for n tokens of a sample, by preempting others; False if it went itself."""
        while n > state.capacity and not self._space.grow(state, n):
            victim = self._requests.victim(self._rules.order, state)
            if victim is state and len(self._requests.running) == 1 and self._is_stuck(state, plan):
                return False
            self._preempt(victim, plan)
            if victim is state:
                return False
        return True

    def _preempt(self, state: SeqState, plan: StepPlan) -> None:
        if self._rules.preempt == "swap" and self._space.offload(state):
            plan.offloaded.append(state)
        else:
            self._space.release(state)
        self._requests.preempt(state)
        plan.drop(state)
        plan.preempted.append(state)

    def _admit(self, plan: StepPlan) -> None:
        """Admits those who wait, in order, until something is used up."""
        n_free = self._n_free(plan)
        if plan.n_left == 0 or n_free <= 0:
            return
        n_asked = n_free + _N_ASKED
        busy = [s for s in self._requests.running if s.n_computed < s.n_prompt]
        for state in self._queue.first(2 * self._space.n_seq_max, self._space.n_cached):
            if plan.n_left == 0 or self._n_free(plan) <= 0 or n_asked == 0:
                return
            if is_awaiting(state):
                continue
            n_asked -= 1
            n_hit = self._space.find_hit(state)
            if n_hit is None and (state.error or self._lacks_room_alone(state)):
                self._is_stuck(state, plan)
            if n_hit is None or gains_by_waiting(state, n_hit, busy, self._rules):
                continue
            n_tokens = n_hit + self._chunk(state, n_hit, plan)
            n_room = n_tokens if state.context is None else state.n_whole
            n_hit = self._space.admit(state, n_room, self._whole(state))
            if n_hit is None:
                if not self._requests.running:
                    self._is_stuck(state, plan)
                return
            self._start(state, n_hit, plan)
            busy.append(state)
            n = min(n_tokens - n_hit, plan.n_left)
            plan.compute(state, self._space.chunk(state, n_hit, n))
            self._plan_forks(plan)

    def _start(self, state: SeqState, n_hit: int, plan: StepPlan) -> None:
        """A sample that waited and was admitted runs."""
        state.n_computed = n_hit
        state.n_cached = n_hit if state.n_cached is None else state.n_cached
        self._queue.remove(state)
        self._requests.start(state)
        plan.admitted.append(state)

    def _begin(self, state: SeqState, src: SeqState, n: int) -> None:
        """A sample that has the first n tokens of another one runs."""
        state.n_computed, state.n_cached = n, min(n, src.n_prompt)
        state.n_gone, state.n_until = src.n_gone, src.n_until
        state.n_before_drop = src.n_before_drop
        self._requests.start(state)

    def _whole(self, state: SeqState) -> int | None:
        """Tokens that must fit; more at each preemption, or it would be preempted again at once."""
        if self._rules.order == "batchllm" and state.context is None:
            running = self._requests.running
            # Alone it begins in any case: its other samples may have to wait for each other.
            return state.n_whole + (n_growth(state, running) if running else 0)
        if self._rules.admit == "whole" or state.context is not None:
            return state.n_whole
        if state.n_preempted:
            return min(state.n_whole, len(state.tokens) + (_MARGIN << min(state.n_preempted, 24)))
        return None if self._rules.admit == "chunk" else len(state.tokens)

    def _n_free(self, plan: StepPlan) -> int:
        """Sequences that may still be admitted."""
        return self._space.n_seq_max - len(self._requests.running) - len(plan.forks)

    def _plan_forks(self, plan: StepPlan) -> None:
        if not self._requests.leaders:
            return
        ending, forked = set(plan.ending), {src for src, _ in plan.forks}
        for leader in self._requests.leaders:
            if leader in ending and leader not in forked:
                followers = leader.followers or []
                plan.forks += [(leader, dst) for dst in followers[: self._n_free(plan)]]

    def _stretch(self, plan: StepPlan) -> None:
        """Gives what is left of the budget to the first prompts, beyond their n_chunk."""
        for i, (state, start, n) in enumerate(plan.prompts):
            more = min(state.n_next(start) - n, plan.n_left)
            longer = self._space.chunk(state, start, n + more) if more > 0 else n
            if longer > n and self._fits(state, start + longer):
                plan.prompts[i] = (state, start, longer)
                plan.n_left -= longer - n

    def _fits(self, state: SeqState, n: int) -> bool:
        """Makes room for n tokens of a sample, if there is some."""
        return n <= state.capacity or self._space.grow(state, n)

    def _lacks_room_alone(self, state: SeqState) -> bool:
        """Whether a sample waits for room for its private prefix although no other one runs."""
        return state.request.private_prefix is not None and not self._requests.running

    def _is_stuck(self, state: SeqState, plan: StepPlan) -> bool:
        """Ends a sample that finds no room again and again although it is alone, or that failed."""
        state.n_stuck += 1
        if state.n_stuck < _N_STUCK and state.error is None:
            return False
        error = state.error or (
            f"{state.request.name} has {len(state.tokens)} tokens, for which there is no room in "
            "the cache although no other request runs; shorten it, unpin a prefix, or raise n_ctx"
        )
        self.finish(state, "error", error)
        plan.refused.append(state)
        return True


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
    for other in () if state.folds else busy:
        if other.folds:
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


def n_growth(state: SeqState, running: Iterable[SeqState]) -> int:
    """Tokens that have to fit one day beside what is there now and all tokens of one more sample.

    Of those who run, what they lack of their ends; of samples that follow one of them or the new
    one, what comes after the prompt that they share.

    Source: BatchLLM, arXiv:2412.03594, memory-centric token batching.
    """
    n = _n_followers(state)
    for other in running:
        n += max(other.n_whole - other.capacity, 0) + _n_followers(other)
    return n


def _n_followers(state: SeqState) -> int:
    return sum(s.n_whole - s.n_prompt for s in state.followers or ())

"""A cache in plain Python: blocks are counted, texts that were computed are remembered as texts."""

from collections.abc import Iterable

from kvrt.options.serving import Rules
from kvrt.serving import request as requests
from kvrt.serving.request import Request, SeqState
from kvrt.serving.scheduling.scheduler import Scheduler
from kvrt.serving.scheduling.step_plan import StepPlan


class PlainSpace:
    """Room in blocks; nothing is shared, and texts once computed are found again for ever.

    Args:
      n_seq_max: sequences.
      n_blocks: blocks of all.
      block: tokens a block.
      finds: whether texts are found again.
      offloads: whether sequences can be offloaded.
    """

    def __init__(self, n_seq_max, n_blocks, *, block=4, finds=False, offloads=False) -> None:
        self.n_seq_max, self.n_blocks, self.block = n_seq_max, n_blocks, block
        self.n_max = n_blocks * block
        self.finds, self.offloads = finds, offloads
        self.held: dict[int, int] = {}
        self.known: set[tuple[bytes, tuple[int, ...]]] = set()
        self.offloaded: dict[SeqState, int] = {}
        self.n_hits = self.n_grows = 0
        self.asked: list[int | None] = []

    @property
    def n_free(self) -> int:
        return self.n_blocks - sum(self.held.values())

    def find_hit(self, state: SeqState) -> int | None:
        self.n_hits += 1
        found = self.offloaded.get(state, 0)
        if self.finds and state.request.cache:
            ends = range(self.block, len(state.tokens), self.block)
            known = [n for n in ends if (state.request.salt, tuple(state.tokens[:n])) in self.known]
            found = max([found, *known])
        return found

    def n_cached(self, state: SeqState) -> int:
        n, self.n_hits = self.n_hits, self.n_hits
        found = self.find_hit(state)
        self.n_hits = n
        return found or 0

    def admit(self, state: SeqState, n_tokens: int, whole: int | None) -> int | None:
        self.asked.append(whole)
        assert len(self.held) < self.n_seq_max and state.seq_id is None
        need = self._blocks(n_tokens)
        if max(need, self._blocks(whole or 0)) > self.n_free:
            return None
        self._start(state, need)
        found = self.find_hit(state)
        self.offloaded.pop(state, None)
        return found

    def capacity(self, seq_id: int) -> int:
        return self.held[seq_id] * self.block

    def grow(self, state: SeqState, n_tokens: int) -> bool:
        self.n_grows += 1
        more = self._blocks(n_tokens) - self.held[state.seq_id]
        assert state.n_computed <= self.capacity(state.seq_id)
        if more > self.n_free:
            return False
        self.held[state.seq_id] += max(more, 0)
        state.capacity = self.capacity(state.seq_id)
        return True

    def grow_by_one(self, states) -> bool:
        return all(self.grow(state, state.n_computed + 1) for state in states)

    def chunk(self, state: SeqState, start: int, n: int) -> int:
        return n

    def edit(self, state: SeqState, edits) -> None:
        assert state.seq_id in self.held
        if state.context is not None:
            self.held[state.seq_id] = self._blocks(state.n_whole)
            state.capacity = state.n_until

    def fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        assert src.n_computed == n_tokens == src.n_prompt and dst.seq_id is None
        if len(self.held) >= self.n_seq_max or self._blocks(n_tokens) > self.n_free:
            return False
        self._start(dst, self._blocks(n_tokens))
        return True

    def holds(self, state: SeqState) -> bool:
        return True

    def release(self, state: SeqState, *, damaged: bool = False, kept: bool = True) -> None:
        del self.held[state.seq_id]
        state.seq_id, state.capacity = None, 0

    def offload(self, state: SeqState) -> bool:
        if self.offloads:
            self.offloaded[state] = state.n_computed
            self.release(state)
        return self.offloads

    def _start(self, state: SeqState, n_blocks: int) -> None:
        state.seq_id = min(set(range(self.n_seq_max)) - set(self.held))
        self.held[state.seq_id] = n_blocks
        state.capacity = self.capacity(state.seq_id)

    def computed(self, state: SeqState) -> None:
        """A step computed more of a sample."""
        for n in range(self.block, (state.n_computed + 1) * self.finds, self.block):
            self.known.add((state.request.salt, tuple(state.tokens[:n])))

    def _blocks(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block)


class Served:
    """A scheduler with a model whose next token is a sum over its tokens and the sample's seed."""

    def __init__(self, space, rules: Rules) -> None:
        self.space, self.rules = space, rules
        self.scheduler = Scheduler(space, rules)
        self.plans: list[StepPlan] = []
        self.ended: dict[tuple[str, int], SeqState] = {}
        self.n_computed = 0

    def add(self, request: Request) -> None:
        for state in requests.samples_of(request):
            self.scheduler.add(state)

    def cancel(self, request_id: str) -> None:
        for state in self.scheduler.cancel(request_id):
            self.ended[request_id, state.sample] = state

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.plans.append(plan)
        self.n_computed += plan.n_tokens
        self._check(plan)
        for state in plan.refused:
            self.ended[state.request.id, state.sample] = state
        self.scheduler.ran(plan)
        for state in [*plan.decode, *(s for s, _, _ in plan.prompts)]:
            self.space.computed(state)
        # Prompts end before their forks sample: all see the tokens as the step left them.
        sampled = [(s, next_token(s)) for s in [*plan.ending, *(dst for _, dst in plan.forks)]]
        for state, token in sampled:
            why = state.append(token)
            if why:
                self.scheduler.finish(state, why)
                self.ended[state.request.id, state.sample] = state
        return plan

    def run(self, n_steps: int) -> None:
        """Steps until everybody has ended."""
        for _ in range(n_steps):
            if not self.scheduler.live:
                return
            self.step()
        raise AssertionError(f"{list(self.scheduler.live)} have not ended in {n_steps} steps")

    def _check(self, plan: StepPlan) -> None:
        """What holds of every plan."""
        assert plan.n_tokens + plan.n_left == self.rules.n_batch and plan.n_left >= 0
        planned = [*plan.decode, *(s for s, _, _ in plan.prompts)]
        assert len({id(s) for s in planned}) == len(planned)
        for state in plan.decode:
            assert state.n_computed == len(state.tokens) - 1 < state.capacity
        for state, start, n in plan.prompts:
            assert n >= 1 and start == state.n_computed and start + n <= len(state.tokens)
            assert start + n <= state.capacity == self.space.capacity(state.seq_id)
        for state in planned:
            assert state.status == "running"
        running = [s.seq_id for s in self.scheduler.running]
        assert len(set(running)) == len(running) == len(self.space.held)
        assert len(running) + len(plan.forks) <= self.space.n_seq_max
        assert not (plan.preempted and plan.admitted)
        assert set(plan.offloaded) <= set(plan.preempted)


def next_token(state: SeqState) -> int:
    return (sum(i * t for i, t in enumerate(state.tokens, 1)) + state.sampling.seed) % 97


def alone(request: Request, sample: int) -> list[int]:
    """What a sample gives when nobody else is there."""
    state = requests.samples_of(request)[sample]
    while True:
        if state.append(next_token(state)):
            return state.output


def ids(states: Iterable[SeqState]) -> list[str]:
    return [s.request.id for s in states]

"""A cache in plain Python: blocks are counted, texts that were computed are remembered as texts."""

from collections.abc import Iterable

from kvrt.serving import request as requests
from kvrt.serving.request import Request, State
from kvrt.serving.scheduler import Scheduler
from kvrt.serving.step_plan import Rules, StepPlan


class PlainSpace:
    """Rows of `block` tokens; nothing is shared, and texts once computed are found again for ever.

    Args:
      n_rows: sequences.
      n_blocks: blocks of all.
      block: tokens a block.
      finds: whether texts are found again.
      parks: whether rows can be parked.
    """

    def __init__(self, n_rows, n_blocks, *, block=4, finds=False, parks=False) -> None:
        self.n_rows, self.n_blocks, self.block = n_rows, n_blocks, block
        self.n_max = n_blocks * block
        self.finds, self.parks = finds, parks
        self.rows: dict[int, int] = {}
        self.known: set[tuple[bytes, tuple[int, ...]]] = set()
        self.parked: dict[State, int] = {}
        self.n_hits = self.n_grows = 0
        self.asked: list[int | None] = []

    @property
    def n_free(self) -> int:
        return self.n_blocks - sum(self.rows.values())

    def hit(self, state: State) -> int | None:
        self.n_hits += 1
        found = self.parked.get(state, 0)
        if self.finds and state.request.cache:
            ends = range(self.block, len(state.tokens), self.block)
            known = [n for n in ends if (state.request.salt, tuple(state.tokens[:n])) in self.known]
            found = max([found, *known])
        return found

    def admit(self, state: State, n_tokens: int, whole: int | None) -> int | None:
        self.asked.append(whole)
        assert len(self.rows) < self.n_rows and state.row is None
        need = self._blocks(n_tokens)
        if max(need, self._blocks(whole or 0)) > self.n_free:
            return None
        state.row = min(set(range(self.n_rows)) - set(self.rows))
        self.rows[state.row] = need
        found = self.hit(state)
        self.parked.pop(state, None)
        return found

    def capacity(self, row: int) -> int:
        return self.rows[row] * self.block

    def grow(self, row: int, n_tokens: int, n_computed: int) -> bool:
        self.n_grows += 1
        more = self._blocks(n_tokens) - self.rows[row]
        assert n_computed <= self.capacity(row)
        if more > self.n_free:
            return False
        self.rows[row] += max(more, 0)
        return True

    def cut(self, state: State, start: int, n: int) -> int:
        return n

    def fork(self, src: State, dst: State, n_tokens: int) -> bool:
        assert src.n_computed == n_tokens == src.n_prompt and dst.row is None
        if len(self.rows) >= self.n_rows or self._blocks(n_tokens) > self.n_free:
            return False
        dst.row = min(set(range(self.n_rows)) - set(self.rows))
        self.rows[dst.row] = self._blocks(n_tokens)
        return True

    def release(self, row: int, state: State) -> None:
        del self.rows[row]

    def park(self, row: int, state: State) -> bool:
        if self.parks:
            del self.rows[row]
            self.parked[state] = state.n_computed
        return self.parks

    def computed(self, state: State) -> None:
        """A step computed more of a text."""
        for n in range(self.block, (state.n_computed + 1) * self.finds, self.block):
            self.known.add((state.request.salt, tuple(state.tokens[:n])))

    def _blocks(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block)


class Served:
    """A scheduler with a model whose next token is a sum over the text and the sample's seed."""

    def __init__(self, space, rules: Rules) -> None:
        self.space, self.rules = space, rules
        self.scheduler = Scheduler(space, rules)
        self.plans: list[StepPlan] = []
        self.ended: dict[tuple[str, int], State] = {}
        self.n_computed = 0

    def add(self, request: Request) -> None:
        for state in requests.begin(request):
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
        # Prompts end before their forks draw: all see the text as the step left it.
        drawn = [(s, next_token(s)) for s in [*plan.ending, *(dst for _, dst in plan.forks)]]
        for state, token in drawn:
            why = state.take(token)
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
            assert start + n <= state.capacity == self.space.capacity(state.row)
        for state in planned:
            assert state.status == "running"
        rows = [s.row for s in self.scheduler.running]
        assert len(set(rows)) == len(rows) == len(self.space.rows)
        assert len(rows) + len(plan.forks) <= self.space.n_rows
        assert not (plan.preempted and plan.admitted)
        assert set(plan.parked) <= set(plan.preempted)


def next_token(state: State) -> int:
    return (sum(i * t for i, t in enumerate(state.tokens, 1)) + state.sampling.seed) % 97


def alone(request: Request, sample: int) -> list[int]:
    """What a sample draws when nobody else is there."""
    state = requests.begin(request)[sample]
    while True:
        if state.take(next_token(state)):
            return state.output


def ids(states: Iterable[State]) -> list[str]:
    return [s.request.id for s in states]

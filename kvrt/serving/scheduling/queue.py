"""The queue of samples that wait to be admitted, in order.

A key in the queue is a tuple that never changes while its owner waits, so the queue is a sorted
list. By arrival, keys are arrivals; by priority, priorities and then arrivals. A sample that was
preempted goes before others of its priority that never ran.

By priority, waiting is bounded: a request that was passed over in n_wait steps is overdue. Overdue
requests go before all others, in the order of the steps in which they came, and by priority if they
came in the same step. So from then on nobody that came in a later step goes before it, and its wait
ends as it would end by arrival.

By prefix, requests that share one are admitted together: when the first in the queue is in no
group, those who wait and share its prefix (same tokens up to n_alike, same salt, same priority) are
placed right behind it, sorted by their prompts, which is the order of a depth-first walk over the
tree of their prefixes. Later arrivals wait for the next round, so every wait ends.

Source: RadixAttention, arXiv:2312.07104, theorem 3.1; BatchLLM, arXiv:2412.03594, sec. 4.
"""

import bisect
import itertools
import operator
from typing import Literal

from kvrt.serving.request import SeqState

Order = Literal["fcfs", "priority"]
QueueKey = tuple[int, ...]

_FRESH = 1  # index in a key: 0 for who was preempted
_N_KEY = 4
_key_of = operator.attrgetter("queue_key")


class WaitingQueue:
    """A queue of samples; adding costs O(log n) comparisons.

    Args:
      order: by arrival, or by priority and then arrival.
      n_wait: by priority, steps after which a request is overdue; None lets the worst wait for as
        long as better ones come.
      n_alike: tokens of the prefix that requests of one group share; None for no groups.

    Attributes:
      n_steps: steps planned, this one included; the scheduler counts them.
    """

    def __init__(self, order: Order, n_wait: int | None, n_alike: int | None) -> None:
        """Starts empty."""
        self._order: Order = order
        self._n_wait = n_wait if order == "priority" else None
        self._n_alike = n_alike
        self.n_steps = 0
        self._queue: list[SeqState] = []
        self._by_step: list[SeqState] = []  # the same states, where they can be overdue
        self._groups: dict[tuple, dict[SeqState, None]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def __contains__(self, state: SeqState) -> bool:
        """Whether a state waits."""
        return state.queue_key is not None

    def first(self, n: int) -> tuple[SeqState, ...]:
        """The first n of those who wait, in order."""
        if self._n_alike is not None and self._queue:
            self._gather(self._queue[0])
        overdue = dict.fromkeys(itertools.takewhile(self._is_overdue, self._by_step[:n]))
        return tuple((overdue | dict.fromkeys(self._queue[:n])) if overdue else self._queue[:n])[:n]

    def rank(self, state: SeqState) -> QueueKey:
        """A lesser one goes first among those who run; an overdue one is preempted last."""
        if self._order == "fcfs":
            return (state.arrival, state.sample)
        if self._is_overdue(state):
            return (0, *_step_key(state))
        return (1, state.request.priority, state.arrival, state.sample)

    def _is_overdue(self, state: SeqState) -> bool:
        return self._n_wait is not None and self.n_steps - state.arrival_step > self._n_wait

    def _key(self, state: SeqState) -> QueueKey:
        rank = state.request.priority if self._order == "priority" else 0
        return (rank, int(state.n_preempted == 0), state.arrival, state.sample)

    def add(self, state: SeqState) -> None:
        """Puts a sample in its place."""
        self._insert(state, self._key(state))
        if self._n_wait is not None:
            bisect.insort(self._by_step, state, key=_step_key)
        if self._n_alike is not None:
            self._groups.setdefault(self._group(state), {})[state] = None

    def remove(self, state: SeqState) -> None:
        """Takes a sample out."""
        self._take(state)
        if self._n_wait is not None:
            at = bisect.bisect_left(self._by_step, _step_key(state), key=_step_key)
            del self._by_step[at]
        if self._n_alike is not None:
            group = self._groups[self._group(state)]
            del group[state]
            if not group:
                del self._groups[self._group(state)]

    def _gather(self, head: SeqState) -> None:
        key = _key_of(head)
        if len(key) > _N_KEY or not key[_FRESH]:
            return  # of a group already, or preempted
        members = [s for s in self._groups[self._group(head)] if _key_of(s)[_FRESH]]
        members.sort(key=lambda s: (s.request.text, s.arrival, s.sample))
        for i, state in enumerate(members):
            self._take(state)
            self._insert(state, (*key, i))

    def _group(self, state: SeqState) -> tuple:
        request = state.request
        return (request.text[: 4 * (self._n_alike or 0)], request.salt, request.priority)

    def _insert(self, state: SeqState, key: QueueKey) -> None:
        state.queue_key = key
        bisect.insort(self._queue, state, key=_key_of)

    def _take(self, state: SeqState) -> None:
        del self._queue[bisect.bisect_left(self._queue, _key_of(state), key=_key_of)]
        state.queue_key = None


def _step_key(state: SeqState) -> QueueKey:
    return (state.arrival_step, state.request.priority, state.arrival, state.sample)

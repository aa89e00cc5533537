"""The queue of samples that wait to be admitted, in order.

A key in the queue is a tuple that never changes while its owner waits, so the queue is a sorted
list. By arrival, keys are arrivals; by priority, priorities and then arrivals. A sample that was
preempted goes before others of its priority that never ran.

By priority, waiting is bounded: a request that was passed over in n_wait steps is overdue. Overdue
requests go before all others, in the order of the steps in which they came, and by priority if they
came in the same step. So from then on nobody that came in a later step goes before it, and its wait
ends as it would end by arrival.

By the longest cached prefix (lpm), those of whom the cache has most go first, looked up at every
step; above 128 that wait it is by arrival, for looking up takes time. Waiting is bounded as it is
by priority. Depth-first (dfs) and by groups (batchllm) there are rounds: when the first in the
queue is in none, all who wait are sorted by `rounds.py`, and later arrivals wait for the next one.

By prefix, where the order is by arrival or by priority, requests that share one are admitted
together: when the first in the queue is in no group, those who wait and share its prefix (same
tokens up to n_alike, same salt, same priority) are placed right behind it, sorted by their prompts,
which is the order of a depth-first walk over the tree of their prefixes. Later arrivals wait for
the next round, so every wait ends.

Source: RadixAttention, arXiv:2312.07104, theorem 3.1; BatchLLM, arXiv:2412.03594, sec. 4.
"""

import bisect
import itertools
import operator
from collections.abc import Callable

from kvrt.options.serving import Order
from kvrt.serving.request import SeqState
from kvrt.serving.scheduling.rounds import by_groups, depth_first

QueueKey = tuple[int, ...]

# Waiting samples up to which the cache is asked about all of them.
_N_RANKED = 128
_FRESH = 1  # index in a key: 0 for who was preempted
_N_KEY = 4
_key_of = operator.attrgetter("queue_key")


class WaitingQueue:
    """A queue of samples; adding costs O(log n) comparisons.

    Args:
      order: by arrival, by priority and then arrival, or by prefixes.
      n_wait: by priority and by the longest cached prefix, steps after which a request is overdue;
        None lets the worst wait for as long as better ones come.
      n_alike: tokens of the prefix that requests of one group share; None for no groups.

    Attributes:
      n_steps: steps planned, this one included; the scheduler counts them.
      waiting: all who wait, in order; not to be changed.
    """

    def __init__(self, order: Order, n_wait: int | None, n_alike: int | None) -> None:
        """Starts empty."""
        self._order: Order = order
        self._n_wait = n_wait if order in ("priority", "lpm") else None
        self._n_alike = n_alike
        self.n_steps = 0
        self.waiting: list[SeqState] = []
        self._by_step: list[SeqState] = []  # the same states, where they can be overdue
        self._groups: dict[tuple, dict[SeqState, None]] = {}

    def __contains__(self, state: SeqState) -> bool:
        """Whether a state waits."""
        return state.queue_key is not None

    def first(self, n: int, n_cached: Callable[[SeqState], int]) -> tuple[SeqState, ...]:
        """The first n of those who wait, in order.

        Args:
          n: how many.
          n_cached: tokens that the cache has of a sample, which some orders ask for.
        """
        if self._n_alike is not None and self.waiting:
            self._gather(self.waiting[0])
        overdue = dict.fromkeys(itertools.takewhile(self._is_overdue, self._by_step[:n]))
        if self._order == "lpm" and len(self.waiting) <= _N_RANKED:
            found = {s: n_cached(s) if _key_of(s)[_FRESH] else 0 for s in self.waiting}
            ranked = sorted(found, key=lambda s: (_key_of(s)[_FRESH], -found[s]))[:n]
        else:
            ranked = self.waiting[:n]
        return tuple((overdue | dict.fromkeys(ranked)) if overdue else ranked)[:n]

    def rank(self, state: SeqState) -> QueueKey:
        """A lesser one goes first among those who run; an overdue one is preempted last."""
        if self._order != "priority":
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
        for i, state in enumerate(self._together(head)):
            self._take(state)
            self._insert(state, (*key, i))

    def _together(self, head: SeqState) -> list[SeqState]:
        """Those who are admitted with the first one, in order."""
        if self._order == "lpm":
            return [head]
        if self._order in ("dfs", "batchllm"):
            fresh = [s for s in self.waiting if _key_of(s)[_FRESH]]
            return (
                depth_first(fresh) if self._order == "dfs" else by_groups(fresh, self._n_alike or 1)
            )
        members = [s for s in self._groups[self._group(head)] if _key_of(s)[_FRESH]]
        return sorted(members, key=lambda s: (s.request.text, s.arrival, s.sample))

    def _group(self, state: SeqState) -> tuple:
        request = state.request
        return (request.text[: 4 * (self._n_alike or 0)], request.salt, request.priority)

    def _insert(self, state: SeqState, key: QueueKey) -> None:
        state.queue_key = key
        bisect.insort(self.waiting, state, key=_key_of)

    def _take(self, state: SeqState) -> None:
        del self.waiting[bisect.bisect_left(self.waiting, _key_of(state), key=_key_of)]
        state.queue_key = None


def _step_key(state: SeqState) -> QueueKey:
    return (state.arrival_step, state.request.priority, state.arrival, state.sample)

"""Who waits, in the order in which they are let in.

A place in the queue is a tuple that never changes while its owner waits, so the queue is a sorted
list. By arrival, places are arrivals; by priority, priorities and then arrivals. A request that
lost its row goes before others of its priority that never had one.

By priority, waiting is bounded: a request that was passed over in n_wait steps is overdue. Overdue
requests go before all others, in the order of the steps in which they came, and by priority if they
came in the same step. So from then on nobody that came in a later step goes before it, and its wait
ends as it would end by arrival.

By prefix, requests that begin alike are let in together: when the first in the queue is nobody
of a group, those who wait and begin as it does (same tokens up to n_alike, same salt, same
priority) are placed right behind it, sorted by their text, which is the order of a depth-first walk
over the tree of their prefixes. Who comes later waits for the next round, so every wait ends.

Source: RadixAttention, arXiv:2312.07104, theorem 3.1; BatchLLM, arXiv:2412.03594, sec. 4.
"""

import bisect
import itertools
from typing import Literal

from kvrt.serving.request import State

Order = Literal["fcfs", "priority"]
Place = tuple[int, ...]

_FRESH = 1  # index in a place: 0 for who lost its row
_N_PLACE = 4


class Waiting:
    """A queue of states; adding costs O(log n) comparisons.

    Args:
      order: by arrival, or by priority and then arrival.
      n_wait: by priority, steps after which a request is overdue; None lets the worst wait for as
        long as better ones come.
      n_alike: tokens that requests of one group begin with; None for no groups.

    Attributes:
      n_steps: steps planned, this one included; the scheduler counts them.
    """

    def __init__(self, order: Order, n_wait: int | None, n_alike: int | None) -> None:
        """Starts empty."""
        self._order: Order = order
        self._n_wait = n_wait if order == "priority" else None
        self._n_alike = n_alike
        self.n_steps = 0
        self._queue: list[State] = []
        self._by_step: list[State] = []  # the same states, where they can be overdue
        self._places: dict[State, Place] = {}
        self._alike: dict[tuple, dict[State, None]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def __contains__(self, state: State) -> bool:
        """Whether a state waits."""
        return state in self._places

    def first(self, n: int) -> tuple[State, ...]:
        """The first n of those who wait, in order."""
        if self._n_alike is not None and self._queue:
            self._gather(self._queue[0])
        overdue = dict.fromkeys(itertools.takewhile(self._is_overdue, self._by_step[:n]))
        return tuple((overdue | dict.fromkeys(self._queue[:n])) if overdue else self._queue[:n])[:n]

    def worth(self, state: State) -> Place:
        """A lesser one goes first among those who run; an overdue one keeps its row longest."""
        if self._order == "fcfs":
            return (state.arrival, state.sample)
        if self._is_overdue(state):
            return (0, *_step_place(state))
        return (1, state.request.priority, state.arrival, state.sample)

    def _is_overdue(self, state: State) -> bool:
        return self._n_wait is not None and self.n_steps - state.arrival_step > self._n_wait

    def _place(self, state: State) -> Place:
        rank = state.request.priority if self._order == "priority" else 0
        return (rank, int(state.n_preempted == 0), state.arrival, state.sample)

    def add(self, state: State) -> None:
        """Puts a state in its place."""
        self._insert(state, self._place(state))
        if self._n_wait is not None:
            bisect.insort(self._by_step, state, key=_step_place)
        if self._n_alike is not None:
            self._alike.setdefault(self._group(state), {})[state] = None

    def remove(self, state: State) -> None:
        """Takes a state out."""
        self._take(state)
        if self._n_wait is not None:
            at = bisect.bisect_left(self._by_step, _step_place(state), key=_step_place)
            del self._by_step[at]
        if self._n_alike is not None:
            group = self._alike[self._group(state)]
            del group[state]
            if not group:
                del self._alike[self._group(state)]

    def _gather(self, head: State) -> None:
        place = self._places[head]
        if len(place) > _N_PLACE or not place[_FRESH]:
            return  # of a group already, or back from a row
        members = [s for s in self._alike[self._group(head)] if self._places[s][_FRESH]]
        members.sort(key=lambda s: (s.request.text, s.arrival, s.sample))
        for i, state in enumerate(members):
            self._take(state)
            self._insert(state, (*place, i))

    def _group(self, state: State) -> tuple:
        request = state.request
        return (request.text[: 4 * (self._n_alike or 0)], request.salt, request.priority)

    def _insert(self, state: State, place: Place) -> None:
        self._places[state] = place
        bisect.insort(self._queue, state, key=self._places.__getitem__)

    def _take(self, state: State) -> None:
        at = bisect.bisect_left(self._queue, self._places[state], key=self._places.__getitem__)
        del self._queue[at]
        del self._places[state]


def _step_place(state: State) -> Place:
    return (state.arrival_step, state.request.priority, state.arrival, state.sample)

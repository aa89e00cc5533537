"""Who waits, in the order in which they are let in.

A place in the queue is a tuple that never changes while its owner waits, so the queue is a sorted
list. By arrival, places are arrivals. By priority, a request that has waited n_aging steps counts
as one priority better: priority * n_aging + the step of its arrival sorts the same at every step,
so nobody is passed for ever. A request that lost its row goes before those that never had one.

By prefix, requests that begin alike are let in together: when the first in the queue is nobody
of a group, those who wait and begin as it does (same tokens up to n_alike, same salt, same
priority) are placed right behind it, sorted by their text, which is the order of a depth-first walk
over the tree of their prefixes. Who comes later waits for the next round, so every wait ends.

Source: RadixAttention, arXiv:2312.07104, theorem 3.1; BatchLLM, arXiv:2412.03594, sec. 4.
"""

import bisect
from typing import Literal

from kvrt.engine.requests import State

Order = Literal["fcfs", "priority"]
Place = tuple[int, ...]

_FRESH = 1  # index in a place: 0 for who lost its row
_N_PLACE = 4


class Waiting:
    """A queue of states; adding costs O(log n) comparisons.

    Args:
      order: by arrival, or by priority and then arrival.
      n_aging: steps of waiting that count as much as one priority; None lets the worst wait for as
        long as better ones come.
      n_alike: tokens that requests of one group begin with; None for no groups.
    """

    def __init__(self, order: Order, n_aging: int | None, n_alike: int | None) -> None:
        """Starts empty."""
        self._order: Order = order
        self._n_aging = n_aging
        self._n_alike = n_alike
        self._queue: list[State] = []
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
        return tuple(self._queue[:n])

    def worth(self, state: State) -> Place:
        """A lesser one goes first among those who run."""
        if self._order == "fcfs":
            return (state.arrival, state.sample)
        rank = state.request.priority
        if self._n_aging is not None:
            rank = rank * self._n_aging + state.arrival_step
        return (rank, state.arrival, state.sample)

    def _place(self, state: State) -> Place:
        rank, *rest = (0, *self.worth(state)) if self._order == "fcfs" else self.worth(state)
        return (rank, int(state.n_preempted == 0), *rest)

    def add(self, state: State) -> None:
        """Puts a state in its place."""
        self._insert(state, self._place(state))
        if self._n_alike is not None:
            self._alike.setdefault(self._group(state), {})[state] = None

    def remove(self, state: State) -> None:
        """Takes a state out."""
        self._take(state)
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

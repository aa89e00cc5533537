"""Who is being served: those with a row, those who wait, and samples that follow another one."""

from kvrt.errors import BadRequest
from kvrt.serving.queue import Order, Waiting
from kvrt.serving.request import State


class Roster:
    """Every sample that has not ended, in exactly one of three places.

    It runs (has a row), waits for one, or follows: samples of one request follow the one that was
    added first until that one has computed the prompt for all.

    Args:
      waiting: the queue.
    """

    def __init__(self, waiting: Waiting) -> None:
        """Starts with nobody."""
        self.waiting = waiting
        self.running: list[State] = []
        self.live: dict[str, list[State]] = {}
        self.followers: dict[State, list[State]] = {}
        self._n_added = 0

    def add(self, state: State, step: int) -> None:
        """Takes a sample in.

        Raises:
          BadRequest: its id is taken, or the sample is here already.
        """
        request = state.request
        there = self.live.get(request.id, [])
        if any(s.request is not request or s.sample == state.sample for s in there):
            raise BadRequest(f"{request.name} is being served already; give another id")
        state.arrival = there[0].arrival if there else self._n_added
        state.arrival_step = step
        leader = next((s for s in there if s in self.followers), None)
        if leader is not None:
            self.followers[leader].append(state)
        else:
            if not there and request.n > 1:
                self.followers[state] = []
            self.waiting.add(state)
        self._n_added += not there
        self.live.setdefault(request.id, []).append(state)

    def seat(self, state: State) -> None:
        """Counts a sample that got a row, and is in no place, among those who run."""
        state.status = "running"
        self.running.append(state)

    def send_back(self, state: State) -> None:
        """Takes the row of a sample, which waits from now on."""
        self.running.remove(state)
        state.row, state.capacity, state.n_computed = None, 0, 0
        state.status = "preempted"
        state.n_preempted += 1
        self.waiting.add(state)

    def victim(self, order: Order) -> State:
        """Who has to give its row up first: the last one let in, or the worst one."""
        if order == "fcfs":
            return self.running[-1]
        return max(self.running, key=self.waiting.worth)

    def part(self, leader: State) -> None:
        """Those who still follow a sample that has computed the prompt wait for rows."""
        for state in self.followers.pop(leader):
            self.waiting.add(state)

    def end(self, state: State) -> None:
        """Takes a sample out for good; the next one that followed it leads."""
        if state.row is not None:
            self.running.remove(state)
        elif state in self.waiting:
            self.waiting.remove(state)
        else:
            next(f for f in self.followers.values() if state in f).remove(state)
        state.row, state.status = None, "finished"
        siblings = self.live[state.request.id]
        siblings.remove(state)
        if not siblings:
            del self.live[state.request.id]
        heirs = self.followers.pop(state, [])
        if heirs:
            self.followers[heirs[0]] = heirs[1:]
            self.waiting.add(heirs[0])

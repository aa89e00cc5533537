"""The requests that are being served: samples that run, that wait, and that follow another one."""

from kvrt.errors import BadRequest
from kvrt.options.serving import Order
from kvrt.serving.request import SeqState
from kvrt.serving.scheduling.queue import WaitingQueue


class LiveRequests:
    """Every sample that has not ended, in exactly one of three places.

    It runs (has a sequence number), waits in the queue, or follows: samples of one request follow
    the one that was added first, their leader, until that one has computed the prompt for all.

    Args:
      queue: of those who wait.

    Attributes:
      queue: likewise.
      running: in the order in which they were admitted.
      live: all, by the id of their request.
      leaders: those with followers, or who may still get some.
    """

    def __init__(self, queue: WaitingQueue) -> None:
        """Starts empty."""
        self.queue = queue
        self.running: list[SeqState] = []
        self.live: dict[str, list[SeqState]] = {}
        self.leaders: dict[SeqState, None] = {}
        self._n_added = 0

    def add(self, state: SeqState, step: int) -> None:
        """Takes a sample in.

        Raises:
          BadRequest: its id is taken, or the sample is here already.
        """
        self.check_new(state)
        there = self.take_in(state, step)
        leader = next((s for s in there if s.followers is not None), None)
        if leader is not None and leader.followers is not None:
            leader.followers.append(state)
        else:
            if not there and state.request.n > 1:
                self._lead(state, [])
            self.queue.add(state)

    def check_new(self, state: SeqState) -> None:
        """Refuses a sample that is here, or whose request's id is another's; raises BadRequest."""
        request = state.request
        there = self.live.get(request.id, [])
        if any(s.request is not request or s.sample == state.sample for s in there):
            raise BadRequest(f"{request.name} is being served already; give another id")

    def take_in(self, state: SeqState, step: int) -> list[SeqState]:
        """Counts a new sample as live; the others of its request, which came before it.

        The caller gives it its place, of those that each sample has one of.
        """
        there = self.live.setdefault(state.request.id, [])
        state.arrival = there[0].arrival if there else self._n_added
        state.arrival_step = step
        self._n_added += not there
        before = list(there)
        there.append(state)
        return before

    def start(self, state: SeqState) -> None:
        """A sample that was admitted, and is in no other place, runs."""
        state.status = "running"
        self.running.append(state)

    def preempt(self, state: SeqState) -> None:
        """A sample that was running waits, with nothing in the cache."""
        self.running.remove(state)
        state.restart()
        state.status = "preempted"
        state.n_preempted += 1
        self.queue.add(state)

    def victim(self, order: Order, asks: SeqState) -> SeqState:
        """The running sample to preempt first: the last one admitted, or the worst by priority.

        Never one whose policy dropped tokens: what others saw of those cannot be computed again.
        Nor one within what it has reserved; if all are, the one that asks for more than it has.
        """
        if order != "priority":
            return next((s for s in reversed(self.running) if s.may_go), asks)
        return max((s for s in self.running if s.may_go), key=self.queue.rank, default=asks)

    def release_followers(self, leader: SeqState) -> None:
        """Those who still follow a sample that has computed the prompt wait in the queue."""
        del self.leaders[leader]
        followers, leader.followers = leader.followers, None
        for state in followers or ():
            self.queue.add(state)

    def remove(self, state: SeqState) -> None:
        """Takes a sample out for good; the next one that followed it leads."""
        siblings = self.live[state.request.id]
        if state.status == "running":
            self.running.remove(state)
        elif state in self.queue:
            self.queue.remove(state)
        else:
            leading = [s.followers for s in siblings if s.followers is not None]
            leading[0].remove(state)
        siblings.remove(state)
        if not siblings:
            del self.live[state.request.id]
        if state.followers is None:
            return
        del self.leaders[state]
        if state.followers:
            heir, *others = state.followers
            self._lead(heir, others)
            self.queue.add(heir)

    def _lead(self, state: SeqState, followers: list[SeqState]) -> None:
        state.followers = followers
        self.leaders[state] = None

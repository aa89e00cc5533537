"""Outputs of an engine: what they say, and who gets those that were not handed out yet."""

from collections import deque
from collections.abc import Callable, Container, Generator, Iterable
from typing import NamedTuple

from kvrt.errors import BadRequest
from kvrt.serving.request import FinishReason, SeqState


class Output(NamedTuple):
    """What a step reports of one sample.

    Attributes:
      id: of the request.
      sample: which of its samples.
      tokens: sampled since the last output.
      finish_reason: why it ended; None while it has not.
      n_cached: tokens of the prompt that were in the cache already.
      error: what went wrong, one line.
      n_dropped: tokens that its policy has dropped, which later ones could not see.
      score: of a beam search, the text's log-probability / n^length_penalty; None of others.
      n_before_drop: tokens that were computed before its policy dropped any; None if it did not.
    """

    id: str
    sample: int
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    n_cached: int = 0
    error: str | None = None
    n_dropped: int = 0
    score: float | None = None
    n_before_drop: int | None = None


class Outputs:
    """Who gets which output: a stream those of its request, a caller of `step` all others."""

    def __init__(self) -> None:
        """Nothing is pending, and nobody streams."""
        self._pending: list[Output] = []
        self._streams: dict[str, deque[Output]] = {}

    @property
    def n_pending(self) -> int:
        """Outputs that the next step hands out."""
        return len(self._pending)

    def is_pending(self, request_id: str) -> bool:
        """Whether the next step hands out something of a request."""
        return any(x.id == request_id for x in self._pending)

    def is_streaming(self, request_id: str) -> bool:
        """Whether a request has a stream."""
        return request_id in self._streams

    def add(self, outputs: Iterable[Output]) -> None:
        """Outputs for the next step."""
        self._pending += outputs

    def take(self) -> list[Output]:
        """Takes all that is pending."""
        taken, self._pending = self._pending, []
        return taken

    def divide(self, outputs: list[Output]) -> list[Output]:
        """Gives streams the outputs of their requests; returns the others."""
        if not self._streams:
            return outputs
        for output in outputs:
            if output.id in self._streams:
                self._streams[output.id].append(output)
        return [x for x in outputs if x.id not in self._streams]

    def stream(
        self, request_id: str, live: Container[str], step: Callable[[], list[Output]]
    ) -> Generator[Output, None, None]:
        """Steps until a request has ended, and yields its outputs; those of others are pending.

        Args:
          request_id: of a request that is being served, or of which outputs are pending.
          live: ids of requests that are being served.
          step: computes the next tokens; what is new.

        Raises:
          BadRequest: no such request is being served, or it has a stream already.
        """
        if not (request_id in live or self.is_pending(request_id)):
            raise BadRequest(f"request {request_id!r} is not being served; add it first")
        mine = self._open(request_id)
        try:
            while mine or request_id in live or self.is_pending(request_id):
                if not mine:
                    self.add(self.divide(step()))
                while mine:
                    yield mine.popleft()
        finally:
            self._close(request_id)

    def _open(self, request_id: str) -> deque[Output]:
        """Opens the stream of a request; `divide` fills it; raises BadRequest if it has one."""
        if request_id in self._streams:
            raise BadRequest(f"request {request_id!r} is being streamed already; read that one")
        stream = self._streams[request_id] = deque()
        return stream

    def _close(self, request_id: str) -> None:
        """Closes a stream; what nobody read of it is pending, before all else."""
        self._pending = [*self._streams.pop(request_id), *self._pending]


def output_of(state: SeqState, tokens: tuple[int, ...]) -> Output:
    """What there is to report of a sample, ended or not."""
    return Output(
        id=state.request.id,
        sample=state.sample,
        tokens=tokens,
        finish_reason=state.finish_reason,
        n_cached=state.n_cached or 0,
        error=state.error,
        n_dropped=state.n_dropped,
        score=state.score,
        n_before_drop=state.n_before_drop,
    )


def bad_logits(state: SeqState) -> str:
    """What went wrong with a sample from whose logits no token can be sampled."""
    at = state.n_past - state.n_past_read - 1
    return (
        f"{state.request.name}: the logits of its token at position {at} have NaN, "
        "+inf or no finite value, so there is no next token; the weights, or the cached keys and "
        "values before it, are damaged: check the model"
    )

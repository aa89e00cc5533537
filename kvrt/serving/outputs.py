"""Outputs of an engine that were not handed out yet, and the streams that wait for some."""

from collections import deque
from collections.abc import Iterable

from kvrt.errors import BadRequest
from kvrt.serving.request import Output


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

    def open(self, request_id: str) -> deque[Output]:
        """Opens the stream of a request; `divide` fills it.

        Raises:
          BadRequest: it has one.
        """
        if request_id in self._streams:
            raise BadRequest(f"request {request_id!r} is being streamed already; read that one")
        stream = self._streams[request_id] = deque()
        return stream

    def close(self, request_id: str) -> None:
        """Closes a stream; what nobody read of it is pending, before all else."""
        self._pending = [*self._streams.pop(request_id), *self._pending]

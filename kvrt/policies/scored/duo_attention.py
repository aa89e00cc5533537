"""DuoAttention: some heads stream, with sinks and the newest tokens; the others keep the text."""

import dataclasses

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import HeadPart, ScoredPolicy, Seen
from kvrt.errors import BadConfig
from kvrt.files.typed_json import json_value, read_typed, typed
from kvrt.options.policies import StreamSizes

_Streaming = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DuoAttention(StreamSizes, ScoredPolicy):
    """Retrieval heads keep `budget` tokens, all of a text that is no longer; the others n_stream.

    Beyond that the oldest go, behind the sinks. Which heads stream is found beforehand: those that
    attend least to what is neither a sink nor near (`python -m scripts.streaming_heads`). The paper
    trains a gate for each head instead.

    Attributes:
      streaming: kv heads that stream, ascending, by layer of the model; layers that are not listed
        have none.
      n_stream: tokens that these keep, sinks among them.

    Source: arXiv:2410.10819, sec. 3.
    """

    def __post_init__(self) -> None:
        """Refuses heads that are listed twice, and budgets of no choice."""
        for heads in self.streaming:
            if list(heads) != sorted(set(heads)) or (heads and heads[0] < 0):
                raise BadConfig(f"streaming heads {heads}: ascending numbers, each once")
        least = self.n_sink + self.recent + 1
        if not least <= self.n_stream <= self.budget:
            raise BadConfig(
                f"n_stream is {self.n_stream}; from {least}, which n_sink {self.n_sink} and "
                f"n_recent {self.recent} want, to the budget of {self.budget} tokens"
            )
        if self.pyramid != 1:
            raise BadConfig("pyramid gives layers other budgets, streaming heads; use one of both")
        ScoredPolicy.__post_init__(self)

    @property
    def n_whole(self) -> int:
        """As `ScoredPolicy.n_whole`: up to the first eviction of a head that streams."""
        return (self.n_stream if any(self.streaming) else self.budget) + self.interval

    def split(self, layer: int, n_kv_heads: int) -> tuple[HeadPart, ...]:
        """Both kinds of heads of a layer; see `ScoredPolicy.split`."""
        listed = layer < len(self.streaming)
        stream = self.streaming[layer] if listed else ()
        if stream and stream[-1] >= n_kv_heads:
            raise BadConfig(
                f"head {stream[-1]} of layer {layer} is to stream, which has {n_kv_heads} kv "
                "heads; find them with this model"
            )
        others = tuple(h for h in range(n_kv_heads) if h not in stream)
        parts = (others, self.budget), (stream, self.n_stream)
        return tuple(x for x in parts if x[0])

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """Positions."""
        return seen.pos.astype(seen.sums.dtype)


def read_streaming(text: str) -> tuple[tuple[int, ...], ...]:
    """The heads that stream by layer: from a file of `scripts.streaming_heads`, or from JSON.

    Args:
      text: a file's name, or the heads themselves, as in "[[1], [0, 2]]".

    Raises:
      BadConfig: the file cannot be read, or has something else.
    """
    if not text.lstrip().startswith("["):
        what = "streaming heads, which scripts.streaming_heads makes"
        found = read_typed(_File | _Streaming, text, what)
        return found.streaming if isinstance(found, _File) else found
    try:
        return typed(_Streaming, json_value(text))
    except ValueError as error:
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise BadConfig(f"{shown}: {error}; name a file of streaming heads") from error


@dataclasses.dataclass(frozen=True)
class _File:
    streaming: _Streaming

"""Pins: prefixes that the prefix cache keeps until they are unpinned, whoever needs room."""

import dataclasses
from collections.abc import Hashable, Sequence

from kvrt.errors import BadConfig, UsageError
from kvrt.options.engine import EngineConfig
from kvrt.serving.cache.space import Space


@dataclasses.dataclass(frozen=True, eq=False)
class Pin:
    """A prefix that is pinned; each is one of its own, whatever others have of the same tokens.

    Attributes:
      tokens: the prefix.
      salt: of the requests that find it.
    """

    tokens: tuple[int, ...]
    salt: bytes = b""


class Pins:
    """The pins of an engine."""

    def __init__(self, space: Space, options: EngineConfig):
        """There is none."""
        self._space, self._has_cache = space, options.prefix_cache
        self._handles: dict[Pin, Hashable] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._handles)

    def pin(self, tokens: Sequence[int], salt: bytes) -> Pin:
        """See `Engine.pin`."""
        if not self._has_cache:
            raise BadConfig("a pin is of the prefix cache, and there is none; set prefix_cache")
        found = self._space.pin_prefix(tokens, salt)
        if found is None:
            raise UsageError(
                f"the prefix cache has nothing of these {len(tokens)} tokens to pin: they were not "
                "computed here (in paged mode a block of them), or evicted; compute them first"
            )
        handle, n = found
        pin = Pin(tuple(tokens[:n]), salt)
        self._handles[pin] = handle
        return pin

    def unpin(self, pin: Pin) -> None:
        """See `Engine.unpin`."""
        if pin not in self._handles:
            raise UsageError(
                f"a prefix of {len(pin.tokens)} tokens is not pinned here; it was unpinned before, "
                "or is another engine's"
            )
        self._space.unpin_prefix(self._handles.pop(pin))

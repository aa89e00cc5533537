"""Decodes a stream of token ids to text as soon as its characters are complete."""

import codecs
from collections.abc import Iterable

from kvrt.errors import UsageError
from kvrt_models.tokenizer.encode import Tokenizer


class TextStream:
    """Decodes token by token and ends at a stop string.

    Bytes of an incomplete character and text that may begin a stop string are held back until the
    next tokens decide. Everything pushed and flushed joins to `tokenizer.decode` of the same ids.

    Attributes:
      stopped: a stop string was found; its text and all that follows is not emitted.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = ()) -> None:
        """Starts an empty stream; raises UsageError for an empty stop string."""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        if "" in self._stop:
            raise UsageError("a stop string is empty; give at least one character or no stop")
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int) -> str:
        """Takes one token id; the text that is certain by now, perhaps none."""
        return self._emit(self._decoder.decode(self._tokenizer.token_bytes(token)), final=False)

    def flush(self) -> str:
        """Ends the stream: the text held back so far, incomplete characters as U+FFFD."""
        return self._emit(self._decoder.decode(b"", final=True), final=True)

    def _emit(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = 0 if final else self._tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _tail(self, text: str) -> int:
        """Length of the longest end of text that begins a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        return next(
            (
                n
                for n in range(longest, 0, -1)
                if any(stop.startswith(text[len(text) - n :]) for stop in self._stop)
            ),
            0,
        )

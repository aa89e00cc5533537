"""A tokenizer.json run by the `tokenizers` library, in this process or in one of its own.

As a program, started by `process.py` through `bounded.py`, it answers requests: one
line of JSON each, one line back. It imports nothing of kvrt, so that it starts soon.
"""

import contextlib
import json
import signal
import sys
from typing import Any

# What a request to the program holds. The first loads a tokenizer, the others encode with it.
LOAD, ENCODE = "load", "encode"


class LibraryTokenizer:
    """The library's tokenizer, without what would change a text on its way to the model."""

    def __init__(self, rules: str) -> None:
        """Builds it.

        Args:
          rules: content of a tokenizer.json.

        Raises:
          Exception: the library refuses it; it raises nothing more special.
        """
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(rules)
        # Files keep from training that texts are cut and padded, and merges left out at random.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            # The model is shared with the tokenizer, so this reaches it.
            self._tokenizer.model.dropout = None

    @property
    def rules(self) -> str:
        """All that decides how text is cut, as tokenizer.json would have it."""
        return self._tokenizer.to_str()

    @property
    def added(self) -> list[tuple[int, str, bool]]:
        """Id and text of tokens added to the vocabulary, and whether they are special."""
        tokens = self._tokenizer.get_added_tokens_decoder()
        return [(i, token.content, token.special) for i, token in tokens.items()]

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text; raises Exception where the library cannot encode it."""
        self._tokenizer.encode_special_tokens = not parse_special
        return self._tokenizer.encode(text, add_special_tokens=add_special).ids


def main() -> None:
    """Answers requests until standard input ends."""
    tokenizer = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _allow(request["cpu_s"])
        try:
            if request["what"] == LOAD:
                tokenizer = LibraryTokenizer(request["text"])
                answer: dict[str, Any] = {"rules": tokenizer.rules, "added": tokenizer.added}
            else:
                assert tokenizer is not None
                options = {key: request[key] for key in ("add_special", "parse_special")}
                answer = {"ids": tokenizer.encode(request["text"], **options)}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # A panic of the library is no Exception.
            answer = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _allow(cpu_s: float) -> None:
    """Sets the processor time until this process is killed, where the system can."""
    with contextlib.suppress(AttributeError):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


if __name__ == "__main__":
    main()

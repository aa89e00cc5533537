"""The prompt before its continuation, for a person at a terminal: standard output lacks it."""

import re
import sys
from collections.abc import Sequence

from kvrt.cli.process import output
from kvrt.cli.report.tables import printable
from kvrt_models.tokenizer.encode import Tokenizer

MOST = 400  # characters; of a longer prompt the end is shown
_WORD = 40  # characters in which a word is expected to end


def show(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Writes the prompt on standard error, if that is a terminal, so that the text follows it."""
    if not sys.stderr.isatty():
        return
    from rich.text import Text

    console = output.console(highlight=False, soft_wrap=True)
    console.print(Text(ending(ids, tokenizer), style="dim"), end="")


def ending(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of a prompt, of a long one the last words behind an ellipsis.

    Control tokens give nothing; control characters are escaped, but for line ends and tabs.
    """
    text = tokenizer.decode(ids[-MOST:])
    if len(ids) > MOST or len(text) > MOST:
        # A character or a word may have been cut in two.
        text = text[-MOST:].lstrip("\ufffd")
        found = re.search(r"\s", text[:_WORD])
        text = "…" + (text[found.start() :] if found else text)
    else:
        # Some vocabularies put a space before a text.
        text = text.lstrip(" ")
    return re.sub(r"[^\n\t]+", lambda part: printable(part[0]), text)

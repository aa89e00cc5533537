"""A line on a terminal that says what is being waited for, and is gone afterwards."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from kvrt.cli.flags.declare import Options
from kvrt.cli.flags.evaluate import ModelFlags
from kvrt.cli.process import output

Say = Callable[[str], None]


@contextlib.contextmanager
def waiting(what: str, wanted: bool) -> Iterator[Say]:
    """Shows `what` on standard error while the block runs, nothing if that is no terminal.

    Gives the function that shows something else in its place.
    """
    if not (wanted and sys.stderr.isatty()):
        yield lambda text: None
        return
    from rich.text import Text

    with output.console().status(Text(what)) as shown:
        yield lambda text: shown.update(Text(text))


def loads(options: Options) -> bool:
    """Whether a command is to load JAX, which takes seconds, and may say so."""
    return isinstance(options, ModelFlags) and "quiet" not in options.given

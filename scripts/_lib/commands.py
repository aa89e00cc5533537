"""What all scripts do with their command line: flags alone, and mistakes in one line."""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from absl import app, flags

from kvrt.errors import KvrtError


def run(main: Callable[[], int | None]) -> None:
    """Runs a script; its exit code is what `main` gives, or that of an error of kvrt."""

    def checked(argv: Sequence[str]) -> int:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        try:
            return main() or 0
        except KvrtError as error:
            print(f"{Path(argv[0]).stem}: {error}", file=sys.stderr)
            return error.exit_code

    app.run(checked)


def check_names(flag: flags.FlagHolder[list[str]], known: Collection[str]) -> None:
    """Refuses names of a list that do not exist, and no name where some are the default.

    Raises:
      app.UsageError: as said.
    """
    unknown = sorted(set(flag.value) - set(known))
    if unknown or (flag.default and not flag.value):
        named = ",".join(unknown) or "nothing"
        raise app.UsageError(f"--{flag.name}={named}; of {', '.join(known)}")

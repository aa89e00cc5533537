"""The command `kvrt`, and `python -m kvrt`: signals are heard before anything else is imported."""

import gc

from kvrt.cli.process import interrupt

# 700 by default: then a tenth of a start goes to searching what is imported and traced for garbage.
_N_ALLOCATIONS = 200_000


def enter() -> None:
    """Entry of the console script; see `kvrt.cli.main.run`."""
    gc.set_threshold(_N_ALLOCATIONS)
    interrupt.end_at_once()
    from kvrt.cli import main

    main.run()


if __name__ == "__main__":
    enter()

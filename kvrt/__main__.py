"""The command `kvrt`, and `python -m kvrt`: signals are heard before anything else is imported."""

from kvrt.cli.process import interrupt


def enter() -> None:
    """Entry of the console script; see `kvrt.cli.main.run`."""
    interrupt.end_at_once()
    from kvrt.cli import main

    main.run()


if __name__ == "__main__":
    enter()

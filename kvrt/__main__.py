"""`python -m kvrt`: the command `kvrt`."""

from kvrt.cli.main import run

if __name__ == "__main__":
    run()

"""`kvrt convert`: a copy of a session with rows of another type."""

from pathlib import Path
from typing import get_args

from kvrt import session
from kvrt.cli import output
from kvrt.cli.fork import new_path
from kvrt.cli.session_options import ConvertOptions
from kvrt.config import RowType
from kvrt.errors import UsageError
from kvrt.session import edit


def execute(options: ConvertOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from being done; nothing is written then.
    """
    assert options.session is not None and options.output is not None
    row_type = _row_type(options.to)
    new = new_path(options.output)
    done = session.save(new, edit.convert(session.read(Path(options.session)), row_type))
    if not options.quiet:
        output.note(f"{new}: rows in {row_type}, {done.n_bytes:,} bytes")
    return 0


def _row_type(wanted: str | None) -> RowType:
    for row_type in get_args(RowType):
        if wanted == row_type:
            return row_type
    if wanted == "q8_0":
        raise UsageError(
            "--to q8_0: quantised rows come with kvrt's quantised cache; use bf16 or f16"
        )
    raise UsageError(f"--to {wanted}: kvrt cannot write these files yet; use f32, bf16 or f16")

"""Tables for people, as text; nothing in a cell reaches the terminal as a control character."""

import io
import shutil
import sys
from collections.abc import Iterable, Sequence

from kvrt.cli.process.output import printable


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under their heads, ending with a newline; numbers stand to the right.

    Args:
      heads: of the columns; all empty for none.
      rows: cells, as many as heads.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=box.SIMPLE_HEAD if any(heads) else None, show_header=any(heads), pad_edge=False
    )
    lines = [[printable(cell) for cell in row] for row in rows]
    for i, head in enumerate(heads):
        numbers = bool(lines) and all(_is_number(row[i]) for row in lines)
        made.add_column(
            Text(printable(head)), justify="right" if numbers else "left", overflow="fold"
        )
    for row in lines:
        made.add_row(*(Text(cell) for cell in row))
    out = io.StringIO()
    # A file or a pipe has no width, and a program that reads it wants whole lines.
    width = max(shutil.get_terminal_size().columns, 60) if sys.stdout.isatty() else 10_000
    Console(file=out, width=width, highlight=False, color_system=None).print(made)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").isdigit()

"""Tables and maps of cells, as text; no control character of a cell reaches the terminal."""

import io
import shutil
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from kvrt.arrays import UInt32
from kvrt.cli.process.output import printable

MAP_WIDTH = 64
OWNERS = "0123456789abcdefghijklmnopqrstuvwxyz"


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


def signs(seqs: UInt32[np.ndarray, "C W"], width: int = MAP_WIDTH) -> list[str]:
    """A sign for each cell, in rows of `width`: its owner, M if shared, `.` if empty.

    Owners beyond 35 share the sign +.
    """
    bits = np.unpackbits(seqs.astype("<u4").view(np.uint8), axis=1, bitorder="little")
    all_signs = np.array([*OWNERS, "+"])
    owner = all_signs[np.minimum(bits.argmax(axis=1), len(OWNERS))]
    n_owners = bits.sum(axis=1, dtype=np.int64)
    text = "".join(np.where(n_owners > 1, "M", np.where(n_owners == 1, owner, ".")).tolist())
    return [text[i : i + width] for i in range(0, len(text), width)]

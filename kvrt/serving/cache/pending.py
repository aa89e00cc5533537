"""What is to run on the device before the next step of an engine in cells, in order."""

from collections.abc import Callable

from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache.blocks import CellCopies


class Pending:
    """Copies of shared cells that moved, windows and states of checkpoints."""

    def __init__(self, cache: CellCache):
        """Nothing yet."""
        self._cache = cache
        self._later: list[Callable[[], None]] = []

    def add(self, run: Callable[[], None]) -> None:
        """Something to run behind what is there already."""
        self._later.append(run)

    def copy(self, copies: tuple[CellCopies, ...]) -> None:
        """Cells to copy, for some that moved and that others share."""
        self.add(lambda: self._cache.copy_cells(copies))

    def run(self) -> None:
        """Runs it all."""
        later, self._later = self._later, []
        for run in later:
            run()

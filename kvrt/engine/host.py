"""The runtime's host side: the ledgers of all groups, changed together."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvrt.cells import rolling
from kvrt.cells.book import Book, Found
from kvrt.config import MAX_POS, CacheConfig, GroupSpec
from kvrt.engine.batch import Places
from kvrt.engine.ledger import Ledger


class Host:
    """A ledger a group; `main` is of a group that knows every position, if there is one."""

    def __init__(self, groups: Sequence[GroupSpec], config: CacheConfig):
        """Empty cells."""
        self.ledgers = tuple(Ledger(g, config) for g in groups)
        self.main = next((x for x in self.ledgers if not x.book.rolls), self.ledgers[0])
        self.rolls = any(x.book.rolls for x in self.ledgers)
        self._counted = [x for x in self.ledgers if not x.book.rolls]

    @property
    def books(self) -> tuple[Book, ...]:
        """The books as they are."""
        return tuple(x.book for x in self.ledgers)

    def commit(self, new: Sequence[Book]) -> None:
        """New books from anything but an append."""
        for ledger, book in zip(self.ledgers, new, strict=True):
            ledger.set(book)

    @property
    def n_free(self) -> int:
        """Tokens that there are cells for; without a limit where every group rolls."""
        free = (x.extent.n_cells - x.n_used for x in self._counted)
        return min(free, default=MAX_POS)

    def pos_max(self, seq_id: int) -> int:
        """The position before the next token of a sequence, -1 if it is empty."""
        return self.main.pos_max(seq_id)

    def earliest_resume(self, seq_id: int) -> int:
        """The least position that every group can go on from."""
        return max(rolling.earliest_resume(b.mask, b.lost.get(seq_id, ())) for b in self.books)

    def find(self, n: int, first: Mapping[int, int]) -> tuple[Found, ...]:
        """Cells for n new tokens in each group; raises CacheFull."""
        return tuple(x.find(n, first) for x in self.ledgers)

    def places(
        self,
        found: Sequence[Found] | None,
        size: int,
        first: Mapping[int, int],
        *,
        ahead: bool = False,
    ) -> tuple[Places, ...]:
        """Places of a step of `size` tokens in each group; without cells nothing is written."""
        none = np.zeros(0, np.int32)
        slots = [none] * len(self.ledgers) if found is None else [f.slots for f in found]
        return tuple(
            x.places(s, size, first, ahead=ahead) for x, s in zip(self.ledgers, slots, strict=True)
        )

    def append(self, found: Sequence[Found], pos: np.ndarray, seq_ids: np.ndarray) -> None:
        """Takes in tokens that a step has written in every group."""
        for ledger, cells in zip(self.ledgers, found, strict=True):
            ledger.append(cells, pos, seq_ids)

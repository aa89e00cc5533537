"""SelfExtend in the cache: how far each sequence has come, and when a round is due.

A cache without it has no `SelfExtendRounds`.
"""

from collections.abc import Mapping

import numpy as np

from kvrt.cellcache.group import CellGroup
from kvrt.cells import Cells, n_shared, seq_pos_max
from kvrt.cells.edits import Copy, SeqEdit
from kvrt.config import SelfExtend
from kvrt.upkeep.self_extend import Extension, plan_extend


class SelfExtendRounds:
    """`ga_i` of each sequence: positions up to it have been divided."""

    def __init__(self, extend: SelfExtend):
        """No sequence has been extended."""
        self._extend = extend
        self._ga_i: dict[int, int] = {}

    def n_copies(self, cells: Cells, seq_id: int, n_new: int) -> int:
        """Cells that rounds may take for copies of shared ones while n_new tokens come in."""
        due = self.n_until(cells, seq_id)
        if due >= n_new:
            return 0
        return int(n_shared(cells, seq_id, self._ga_i.get(seq_id, 0)))

    def n_until(self, cells: Cells, seq_id: int) -> int:
        """Tokens that a step may append before a round is due."""
        n_past = int(seq_pos_max(cells, seq_id)) + 1
        return max(self._reached(seq_id, n_past) + self._extend.ga_w - n_past, 0)

    def plan(self, groups: tuple[CellGroup, ...], seq_id: int) -> list[Extension]:
        """The rounds that are due in every group; none if none is."""
        if self.n_until(groups[0].cells, seq_id):
            return []
        ga_i = self._ga_i.get(seq_id, 0)
        return [plan_extend(g.cells, g.head, seq_id, ga_i, self._extend) for g in groups]

    def took(self, seq_id: int, extension: Extension) -> None:
        """Takes note that an extension was committed."""
        self._ga_i[seq_id] = extension.ga_i

    def apply(self, edit: SeqEdit) -> None:
        """After an edit: a copy has come as far as its source, others are looked at when due."""
        if isinstance(edit, Copy) and edit.src in self._ga_i:
            self._ga_i[edit.dst] = max(self._ga_i[edit.src], self._ga_i.get(edit.dst, 0))

    @property
    def reached(self) -> dict[int, int]:
        """`ga_i` of every sequence."""
        return dict(self._ga_i)

    def restore(self, reached: Mapping[int, int]) -> None:
        """Takes `ga_i` of sequences from a session."""
        self._ga_i |= reached

    def forget(self) -> None:
        """Drops all sequences."""
        self._ga_i.clear()

    def _reached(self, seq_id: int, n_past: int) -> int:
        """`ga_i`; a sequence that was cut short of it continues from the group where it ends."""
        group = self._extend.ga_w // self._extend.ga_n
        reached = min(self._ga_i.get(seq_id, 0), int(np.ceil(n_past / group)) * group)
        self._ga_i[seq_id] = reached
        return reached


def open_rounds(extend: SelfExtend | None) -> SelfExtendRounds | None:
    """The rounds of a cache; None where none would ever move a position."""
    if extend is None or extend.kind != "cache" or extend.ga_n == 1:
        return None
    return SelfExtendRounds(extend)

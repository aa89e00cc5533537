"""SelfExtend in the cache: how far each sequence has come, and when a round is due."""

from collections.abc import Mapping

import numpy as np

from kvrt.cellcache import history as texts
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.history import TokenHistory
from kvrt.cells import Cells, n_shared, seq_pos_max
from kvrt.config import SelfExtend
from kvrt.upkeep.self_extend import Extension, plan_extend


class Extender:
    """`ga_i` of each sequence; without SelfExtend in the cache nothing is ever due."""

    def __init__(self, extend: SelfExtend | None):
        """No sequence has come anywhere."""
        inside = extend is not None and extend.kind == "cache" and extend.ga_n > 1
        self._extend = extend if inside else None
        self._ga_i: dict[int, int] = {}

    @property
    def moves(self) -> bool:
        """Whether positions ever move."""
        return self._extend is not None

    def n_copies(self, cells: Cells, seq_id: int, n_new: int) -> int:
        """Cells that rounds may take for copies of shared ones while n_new tokens come in."""
        due = self.n_until(cells, seq_id)
        if due is None or due >= n_new:
            return 0
        return int(n_shared(cells, seq_id, self._ga_i.get(seq_id, 0)))

    def n_until(self, cells: Cells, seq_id: int) -> int | None:
        """Tokens that a step may append before a round is due; None is any number."""
        if self._extend is None:
            return None
        n_past = int(seq_pos_max(cells, seq_id)) + 1
        return max(self._reached(seq_id, n_past) + self._extend.ga_w - n_past, 0)

    def plan(self, held: tuple[CellGroup, ...], seq_id: int) -> list[Extension]:
        """The rounds that are due in every group; none if none is."""
        extend = self._extend
        if extend is None or self.n_until(held[0].cells, seq_id):
            return []
        ga_i = self._ga_i.get(seq_id, 0)
        return [plan_extend(b.cells, b.head, seq_id, ga_i, extend) for b in held]

    def moved(self, text: TokenHistory, seq_id: int, extension: Extension) -> TokenHistory:
        """The text after what the extension does to positions."""
        for m in extension.moves:
            text = texts.div(text, seq_id, m.p0, m.p1, m.div)
            text = texts.add(text, seq_id, m.p0, m.p1, m.add)
        return text

    def took(self, seq_id: int, extension: Extension) -> None:
        """The extension is in the cells now."""
        self._ga_i[seq_id] = extension.ga_i

    def copied(self, src: int, dst: int) -> None:
        """A sequence got cells of another."""
        if src in self._ga_i:
            self._ga_i[dst] = max(self._ga_i[src], self._ga_i.get(dst, 0))

    @property
    def reached(self) -> dict[int, int]:
        """`ga_i` of every sequence."""
        return dict(self._ga_i)

    def restored(self, reached: Mapping[int, int]) -> None:
        """Sequences came from elsewhere, extended so far there."""
        if self._extend is not None:
            self._ga_i |= reached

    def forget(self) -> None:
        """All sequences are gone."""
        self._ga_i.clear()

    def _reached(self, seq_id: int, n_past: int) -> int:
        """`ga_i`; a sequence that was cut short of it goes on from the group where it ends."""
        assert self._extend is not None
        group = self._extend.ga_w // self._extend.ga_n
        reached = min(self._ga_i.get(seq_id, 0), int(np.ceil(n_past / group)) * group)
        self._ga_i[seq_id] = reached
        return reached

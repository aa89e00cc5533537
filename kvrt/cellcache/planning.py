"""The runtime's host side: the ledgers of all groups and the states, changed together."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kvrt.arrays import Bool
from kvrt.cellcache import contents as memories
from kvrt.cellcache import history as texts
from kvrt.cellcache import recurrent as states
from kvrt.cellcache import window
from kvrt.cellcache.block_index import IndexedGroup
from kvrt.cellcache.blocks import Blocks
from kvrt.cellcache.contents import CacheContents, Moved
from kvrt.cellcache.group import Found
from kvrt.cellcache.recurrent import StatePlan
from kvrt.cells import Cells
from kvrt.config import MAX_POS, CacheConfig, GroupSpec, RecurrentSpec
from kvrt.program.batch import Places, pad
from kvrt.store.recurrent import StateIndex, n_states


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """Cells and state rows for new tokens; `seq_ids` are the tokens' own."""

    seq_ids: np.ndarray
    first: Mapping[int, int]
    found: tuple[Found, ...]
    states: StatePlan | None


class HostCells:
    """A ledger for each group of attention layers, and the states of recurrent ones.

    `main` is the ledger of a group that knows every position, if there is one; `counted` are
    those of all such groups.
    """

    def __init__(
        self, groups: Sequence[GroupSpec], recurrent: RecurrentSpec | None, config: CacheConfig
    ):
        """Empty cells."""
        self.groups = tuple(IndexedGroup(g, config) for g in groups)
        kept = [x for x in self.groups if not x.book.rolls]
        self.main: IndexedGroup | None = next(iter([*kept, *self.groups]), None)
        self.rolls = len(kept) < len(self.groups)
        self.counted, self._n_seq_max = kept, config.n_seq_max
        self.text = texts.TokenHistory()
        self.states: states.States | None = None
        if recurrent:
            self.states = states.States(n_rows=n_states(config), depth=1 + config.n_rs_seq)

    @property
    def memory(self) -> CacheContents:
        """Books, states and text as they are."""
        books = tuple(x.book for x in self.groups)
        return CacheContents(books=books, states=self.states, text=self.text)

    @property
    def cells(self) -> Cells:
        """Positions and owners of the main group; of the states, where nothing else is kept."""
        if self.main is not None:
            return self.main.cells
        assert self.states is not None, "a model without layers"
        return states.as_cells(self.states, self._n_seq_max)

    def commit(self, new: CacheContents) -> None:
        """New books, states and text from anything but an append."""
        for ledger, book in zip(self.groups, new.books, strict=True):
            ledger.set(book)
        self.states, self.text = new.states, new.text

    @property
    def n_free(self) -> int:
        """Tokens that there are cells for; without a limit where no group keeps them all.

        Empty cells that sequences in blocks keep are not counted.
        """
        return min((x.n_free for x in self.counted), default=MAX_POS)

    @property
    def blocks(self) -> Blocks | None:
        """Which sequences lie in blocks; None is none."""
        return self.counted[0].book.blocks if self.counted else None

    def room(self, seq_id: int) -> int:
        """Tokens at the end of a sequence that there is room for."""
        return min((x.room(seq_id) for x in self.counted), default=MAX_POS)

    def own(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> Moved | None:
        """What has to be copied before tokens are found cells, None for nothing.

        Raises:
          CacheFull: sequences lie in blocks, and the tokens do not fit.
        """
        if self.blocks is None:
            return None
        moved, rows = memories.own(self.memory, seq_ids, first)
        return (moved, rows) if any(len(src) for src, _ in rows) else None

    def pos_max(self, seq_id: int) -> int:
        """The position before the next token of a sequence, -1 if it is empty."""
        if self.main is not None:
            return self.main.pos_max(seq_id)
        return states.n_past(self.states, seq_id) - 1 if self.states else -1

    def earliest_resume(self, seq_id: int) -> int:
        """The least position that every layer can go on from."""
        found = [window.earliest_resume(b.mask, b.lost.get(seq_id, ())) for b in self.memory.books]
        if self.states:
            found.append(states.earliest_resume(self.states, seq_id))
        return max(found)

    def find(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> SlotPlan:
        """Cells for new tokens in each group, and rows for their states; raises CacheFull."""
        return SlotPlan(
            seq_ids=seq_ids,
            first=first,
            found=tuple(x.find(seq_ids, first) for x in self.groups),
            states=states.plan(self.states, seq_ids, first) if self.states else None,
        )

    def probe(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> SlotPlan:
        """As `find`, for tokens that leave nothing behind."""
        none = np.zeros(0, np.int32)
        return SlotPlan(
            seq_ids=seq_ids,
            first=first,
            found=tuple(Found(slots=none, book=b) for b in self.memory.books),
            states=states.plan_probe(self.states, int(seq_ids[0]), len(seq_ids))
            if self.states
            else None,
        )

    def places(
        self, plan: SlotPlan, size: int, *, ahead: bool = False
    ) -> tuple[tuple[Places, ...], StateIndex | None]:
        """What a step of `size` tokens is told of its cells and states."""
        places = tuple(
            x.places(f.slots, size, plan.first, ahead=ahead)
            for x, f in zip(self.groups, plan.found, strict=True)
        )
        if plan.states is None:
            return places, None
        # Padding starts from no state and ends nowhere: one beyond the scratch row.
        none = plan.states.after.n_rows + 1
        src, dst = (pad(x, size, none) for x in (plan.states.src, plan.states.dst))
        return places, StateIndex(src=src, dst=dst)

    def released_states(self) -> Bool[np.ndarray, " R"]:
        """Which rows of states nobody owns, scratch included."""
        return states.released(self.states) if self.states else np.zeros(0, bool)

    def append(self, plan: SlotPlan, pos: np.ndarray, ids: np.ndarray) -> None:
        """Takes in tokens that a step has written in every layer, all of a plan or its first."""
        seq_ids = plan.seq_ids[: len(pos)]
        self.text = texts.append(self.text, seq_ids, pos, ids)
        for ledger, found in zip(self.groups, plan.found, strict=True):
            ledger.append(found, pos, seq_ids)
        if self.states is not None and plan.states is not None:
            whole = len(pos) == len(plan.seq_ids)
            after = plan.states if whole else states.plan(self.states, seq_ids, plan.first)
            self.states = after.after

"""Which blocks have keys that labels do not follow yet, and the program that labels them."""

from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.attention.select import labels as label_arrays
from kvrt.attention.select.labels import LabelPlan, StoreLabels
from kvrt.cells.slots import Places, pad
from kvrt.program.labels.arrays import n_labelled
from kvrt.program.programs import Program
from kvrt.program.step import Cache
from kvrt.sizes import StoreSpec


class LabelUpkeep:
    """Marks blocks whose keys were written, moved or loaded, until they are labelled again.

    Steps of one token a sequence label what they write themselves, and a K-shift what it rotates.
    """

    def __init__(self, plan: LabelPlan, stores: Sequence[StoreSpec]):
        """Nothing is marked: an empty cache has no keys."""
        self._plan = plan
        self._sizes = [s.extent.block_size for s in stores]
        self._marked: list[Bool[np.ndarray, " N"]] = [
            np.zeros(s.extent.n_blocks, bool) for s in stores
        ]
        self._held = [np.zeros(s.extent.n_slots, bool) for s in stores]

    def mark_all(self) -> None:
        """Marks every block of every store."""
        for marked in self._marked:
            marked[:] = True

    def mark(self, store: int | None, blocks: np.ndarray) -> None:
        """Marks blocks of a store; those of padding, and states (None), are passed over."""
        if store is not None:
            marked = self._marked[store]
            marked[blocks[(blocks >= 0) & (blocks < len(marked))]] = True

    def mark_slots(self, store: int, slots: np.ndarray) -> None:
        """Marks the blocks of some cells."""
        self.mark(store, np.unique(np.asarray(slots) // self._sizes[store]))

    def mark_step(self, store_of: Sequence[int], places: Sequence[Places]) -> None:
        """Marks what a step, or each step of a run, writes and does not label itself."""
        for i, of_group in zip(store_of, places, strict=True):
            slots = np.asarray(of_group.slots)
            self.mark_slots(i, slots[..., n_labelled(of_group) :])
            self._held[i][slots[slots < len(self._held[i])]] = True

    def mark_changed(self, store: int, pos: Int32[np.ndarray, " C"]) -> None:
        """Marks the blocks of cells that hold a token, or none any more, without a step's doing.

        Extremes are of cells that hold one, and those that somebody finds again hold it again.
        """
        held = np.zeros_like(self._held[store])
        held[: len(pos)] = pos >= 0
        (changed,) = np.nonzero(self._held[store] ^ held)
        self.mark_slots(store, changed)
        self._held[store] = held

    def pending(self, cache: Cache) -> Program | None:
        """The program that labels all that is marked, which is then no more; None for nothing."""
        if not any(marked.any() for marked in self._marked):
            return None
        blocks = []
        for marked in self._marked:
            (ids,) = np.nonzero(marked)
            blocks.append((pad(ids, len(marked), 0), np.asarray(len(ids), np.int32)))
            marked[:] = False
        pos = tuple(cells.pos for cells in cache.cells)
        args = cache.labels, cache.stores, pos, tuple(blocks)
        return Program(relabelled, (self._plan,), args, donate=(0,))


def relabelled(
    plan: LabelPlan, labels: tuple, stores: tuple, pos: tuple, blocks: tuple
) -> tuple[StoreLabels, ...]:
    """Labels of all stores, those of some blocks made anew; inside a program.

    Args:
      plan: which arrays have labels.
      labels: by store, as for what follows; donated.
      stores: keys.
      pos: positions of cells. `[C]`
      blocks: block list and how many of its entries count.
    """
    found = []
    for i, (of_store, kv) in enumerate(zip(labels, stores, strict=True)):
        shaped = pos[i].reshape(blocks[i][0].shape[0], -1)
        found.append(label_arrays.rebuild(plan, i, of_store, kv, shaped, blocks[i]))
    return tuple(found)

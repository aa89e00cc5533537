"""The runtime's host side: cells and what is derived from them, so that no step scans them all."""

from collections.abc import Sequence

import numpy as np

from kvrt import cells as meaning
from kvrt.arrays import Array
from kvrt.config import CacheConfig
from kvrt.engine.batch import BlockIndex
from kvrt.errors import BadToken
from kvrt.upkeep import shift


class Ledger:
    """Cells on the host, the search hint `head`, and memos that an append keeps true.

    `stale` says that the device's copy of the cells lags behind, `pending` that keys await their
    rotation.
    """

    def __init__(self, config: CacheConfig):
        """Empty cells."""
        self.cells = meaning.create(config.n_ctx, config.n_seq_max)
        self.head = 0
        self.n_used = 0
        self.stale = self.pending = False
        self._raw_keys = config.rope == "read"
        self._index = BlockIndex(config.n_blocks, config.block_size)
        self._pos_max: dict[int, int] = {}

    def set(self, cells: meaning.Cells, head: meaning.Scalar) -> None:
        """New cells from anything but an append; keys stored unrotated have nothing pending."""
        self.pending = not self._raw_keys and bool(np.any(cells.delta))
        if self._raw_keys:
            cells = shift.settle(cells)
        self.cells, self.head = cells, int(head)
        self.n_used = int(meaning.n_used(cells))
        self.stale = True
        self._index.reset()
        self._pos_max.clear()

    def settle(self) -> None:
        """The device has rotated what was pending."""
        self.cells, self.pending = shift.settle(self.cells), False

    def find(self, n: int) -> np.ndarray:
        """Cells for n new tokens; raises CacheFull."""
        return meaning.plan_slots(self.cells, self.head, n, n_used=self.n_used)

    def append(self, slots: np.ndarray, pos: np.ndarray, seq_ids: np.ndarray) -> None:
        """Takes in tokens that a step has written; the device's cells took them in as well."""
        self.cells = meaning.place(self.cells, slots, pos, seq_ids)
        self.head = int(meaning.next_head(slots))
        self.n_used += len(slots)
        for s in np.unique(seq_ids).tolist():
            mine = seq_ids == s
            self._index.add(s, slots[mine])
            self._pos_max[s] = max(self._pos_max.get(s, -1), int(pos[mine].max()))

    def pos_max(self, seq_id: int) -> int:
        """Greatest position of a sequence, -1 if it is empty."""
        if seq_id not in self._pos_max:
            self._pos_max[seq_id] = int(meaning.seq_pos_max(self.cells, seq_id))
        return self._pos_max[seq_id]

    def blocks(
        self, seq_ids: Sequence[int], ahead: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of the sequences, padded, and their number; with `ahead` also those of slots."""
        found = self._index.of(self.cells, seq_ids)
        if ahead is None or len(ahead) < 2:
            return found
        for s in seq_ids:
            self._index.add(s, ahead)
        return self._index.of(self.cells, seq_ids)


class LastLogits:
    """Logits of the newest token of each sequence, for the draw that follows."""

    def __init__(self):
        """None yet."""
        self._of: dict[int, tuple[int, Array]] = {}

    def put(self, seq_id: int, pos: int, logits: Array) -> None:
        """Keeps logits [1, V] of the token at `pos`."""
        self._of[seq_id] = (pos, logits)

    def forget(self, seq_id: int | None) -> None:
        """The sequence, or with None every one, was changed: its logits belong to what it was."""
        held = list(self._of) if seq_id is None else [seq_id]
        for s in held:
            self._of.pop(s, None)

    def get(self, seq_id: int, pos: int) -> Array:
        """The logits of the newest token, which stands at `pos`.

        Raises:
          BadToken: the sequence is empty, or was changed since its end was evaluated.
        """
        held = self._of.get(seq_id)
        if pos < 0 or held is None or held[0] != pos:
            raise BadToken(
                f"sequence {seq_id} has no logits to draw from; append at least one token first "
                "(after removing tokens, remove one more and append it again)"
            )
        return held[1]

"""Edits of sequences, as llama.cpp's `llama_memory_seq_*`, and where a sequence lies."""

from typing import TypeVar

import numpy as np

from kvrt.arrays import Int32
from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache import contents
from kvrt.cells import n_used
from kvrt.cells.edits import Copy, Divide, Keep, Remove, Shift
from kvrt.exclusive import Exclusive, one_call_at_a_time
from kvrt.kv_types import described
from kvrt.runtime import whole_cells
from kvrt.runtime.stepper import Stepper

Itself = TypeVar("Itself")


@one_call_at_a_time(free=(), reads=("can_remove", "table"))
class SequenceEdits:
    """What a `Runtime` does with sequences beside evaluating tokens."""

    _exclusive: Exclusive
    _cache: CellCache
    _stepper: Stepper
    _model_name: str

    def __repr__(self) -> str:
        """The model's class, cells, KV dtypes and what computes attention."""
        config, n = self._cache.device.spec.config, int(n_used(self._cache.host.cells))
        of = f"{self._model_name}: {n} of {config.n_ctx} cells used"
        return f"<Runtime of {of}, {described(config.type_k, config.type_v)}, {config.attention}>"

    def can_remove(self, seq_id: int, p0: int = 0, p1: int | None = None) -> bool:
        """Whether `seq_rm` of this range would leave every layer what the next token sees."""
        return self._cache.can_remove(seq_id, p0, p1)

    def seq_rm(self, seq_id: int | None, p0: int = 0, p1: int | None = None) -> None:
        """Removes positions [p0, p1) of a sequence; of all sequences with None.

        Cells that nobody owns any more are freed. Where layers cannot be cut back to p0 itself, the
        checkpoint before it is resumed and the tokens from there to p0 are evaluated again.

        Raises:
          BadSequence: seq_id outside [0, n_seq_max).
          BadRange: the range is negative or reversed.
          CannotRewind: a layer no longer has what the next token sees, nor a checkpoint before it.
        """
        self._stepper.remove(Remove(seq_id=seq_id, p0=p0, p1=p1))

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """Shares positions [p0, p1) of src with dst; no keys or values are copied.

        Raises:
          UsageError: one of them lies or lay in blocks, and some layers share already what others
            have copied.
        """
        self._cache.apply(Copy(src=src, dst=dst, p0=p0, p1=p1))

    def seq_keep(self, seq_id: int) -> None:
        """Removes every other sequence."""
        self._cache.apply(Keep(seq_id=seq_id))

    def seq_add(self, seq_id: int, p0: int, p1: int | None, d: int) -> None:
        """Moves positions [p0, p1) by d tokens; those that would be negative are freed.

        Cells shared with another sequence are copied first, so that only seq_id moves.

        Raises:
          BadRange: a position would exceed 2^31 - 1, or the range is negative or reversed.
          CacheFull: too few free cells for the copies.
        """
        self._cache.apply(Shift(seq_id=seq_id, p0=p0, p1=p1, d=d))

    def evict_cells(
        self, seq_id: int, n_keep: int, *, window: int = 32, n_sink: int = 4
    ) -> Int32[np.ndarray, " n"]:
        """Removes all but n_keep tokens of a sequence: one set for all heads and layers.

        Those stay that the newest `window` tokens attend to most, by sums over heads and layers,
        these tokens themselves, and positions below n_sink. Positions stay what they are; cells
        that nobody else owns are freed. The window is evaluated once more for it.

        Args:
          seq_id: the sequence; if it has no more than n_keep tokens nothing goes.
          n_keep: tokens that stay.
          window: newest tokens whose attention counts.
          n_sink: first positions that stay.

        Returns:
          The positions that were removed, ascending.

        Raises:
          UsageError: n_keep leaves nothing to choose.
          BadSequence: seq_id outside [0, n_seq_max).
          BadRange: several tokens have one position.
          CannotRewind: windowed layers that reuse cells, and recurrent ones.
          BadConfig: unrotated keys, SelfExtend, keys by channel, latents, a mesh, or blocks.
        """
        spec = whole_cells.CellEviction(n_keep=n_keep, window=window, n_sink=n_sink)
        return whole_cells.evict_cells(self._cache, seq_id, spec)

    def seq_div(self, seq_id: int, p0: int, p1: int | None, d: int) -> None:
        """Divides positions [p0, p1) by d, rounding down; shared cells as in `seq_add`."""
        self._cache.apply(Divide(seq_id=seq_id, p0=p0, p1=p1, d=d))

    def clear(self) -> None:
        """Empties every cell; bytes of keys and values stay, unread, until `scrub`."""
        self._cache.clear()

    def scrub(self) -> None:
        """Zeroes keys and values of empty cells, so that nothing of what was removed is left."""
        self._cache.flush()
        self._cache.device.scrub(self._cache.host.released_states())

    def close(self) -> None:
        """Frees keys and values on the device; of the rest only what needs none may be called.

        That is `stats`, `cells`, `token_history` and the other members that are free at any time.
        """
        self._cache.device.free()
        self._exclusive.is_closed = True

    def __enter__(self: Itself) -> Itself:
        """The runtime itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        if not self._exclusive.is_closed:
            self.close()

    def to_blocks(self, seq_id: int) -> int:
        """Places a sequence in blocks of block_size cells; returns how many cells were copied.

        In each group that keeps all positions, its token of position p then lies in block
        table[p // block_size], at p % block_size, and new tokens follow there or in empty blocks.
        Windows that use cells again and recurrent states are not affected. Until all its tokens are
        removed, or `to_cells`, positions cannot move and the cache is not packed. A session puts it
        into blocks again, but for a runtime that moves positions, where it restores into cells.

        Raises:
          BadConfig: a policy or SelfExtend moves positions, or no layer keeps them all.
          CacheFull: too few blocks are empty.
          UsageError: it has a position twice.
        """
        return self._cache.to_blocks(seq_id)

    def to_cells(self, seq_id: int) -> None:
        """Takes a sequence out of blocks; its tokens stay where they are, nothing is copied."""
        self._cache.to_cells(seq_id)

    def table(self, seq_id: int) -> tuple[tuple[int, ...] | None, ...]:
        """By group, blocks of a sequence by position // block_size, -1 for one without a token.

        None where it lies in cells, as in every group that uses cells again.
        """
        return contents.tables(self._cache.host.contents, self._cache.check_seq_id(seq_id))

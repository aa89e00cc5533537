"""Context checkpoints of a cell cache: made at the end of a sequence, and resumed from.

Their bytes are copies on the device, made there before the next step can overwrite what they are
of; nothing waits for them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import AnyArray, Array
from kvrt.cellcache.checkpoint import checkpoints, rewind
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint, CheckpointLimits, Checkpoints
from kvrt.cellcache.checkpoint.rewind import RewindPlan
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.host_cells import HostCells
from kvrt.cellcache.insert import Sequences
from kvrt.cellcache.saved import SavedCells
from kvrt.cells.slots import pad
from kvrt.config import MAX_POS
from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.program.device import Device
from kvrt.session import kv_arrays
from kvrt.session.snapshot import CheckpointPart, TailPart
from kvrt.store import kv as kv_store
from kvrt.store import recurrent
from kvrt.store.codec import AnyKVArray
from kvrt.store.recurrent import OneState

_CELLS = tuple(x.name for x in dataclasses.fields(SavedCells))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointData:
    """The bytes of a checkpoint.

    Attributes:
      tails: by group, keys and values of the cells of its tail in every layer, padded to whole
        windows; None where it has none. `[L, n, H, D]`
      state: arrays of each recurrent layer's state; None without such layers.
    """

    tails: tuple[tuple[AnyKVArray, AnyKVArray] | None, ...]
    state: OneState | None


class ContextCheckpoints:
    """Makes checkpoints and writes them back.

    Attributes:
      interval: they are made at its multiples, in tokens; 0 is only where appends begin and end.
      limits: how many are kept.
    """

    def __init__(self, host: HostCells, device: Device, config: CacheConfig):
        """Nothing is kept yet.

        Raises:
          BadConfig: one checkpoint takes more than the budget.
        """
        self._host, self._device = host, device
        every = config.checkpoint_interval
        self.interval = config.n_ubatch if every is None else every
        self.limits = CheckpointLimits(n_most=config.n_checkpoints, n_bytes=config.checkpoint_bytes)
        self._cell_bytes = [kv_store.cell_bytes(x) for x in device.layout.stores]
        self._state_bytes = recurrent.bytes_of_one(device.layout.recurrent)
        whole = [x.group.mask.size * n for x, n in zip(host.groups, self._cell_bytes, strict=True)]
        one = self._state_bytes + sum(
            n for n, x in zip(whole, host.groups, strict=True) if x.group.rolls
        )
        if self.limits.n_bytes is not None and self.limits.n_bytes < one:
            raise BadConfig(
                f"checkpoint_bytes is {self.limits.n_bytes:,}, one checkpoint of this model takes "
                f"{one:,}; raise it, or set n_checkpoints to 0"
            )

    def n_until(self, pos: int) -> int:
        """Tokens from a position to where the next one is due; many without an interval."""
        return self.interval - pos % self.interval if self.interval else MAX_POS

    def is_due(self, pos: int) -> bool:
        """Whether one is to be made at a position, wherever the append ends."""
        return self.interval > 0 and pos % self.interval == 0

    def planned(self, seq_id: int) -> CacheContents | None:
        """The contents with a checkpoint at the end of a sequence; None if there is one already.

        No change of positions may be pending.
        """
        before, pos = self._host.contents, self._host.pos_max(seq_id) + 1
        if pos == 0 or any(x.pos == pos for x in before.checkpoints.of(seq_id)):
            return None
        tails = tuple(rewind.tail(g, seq_id) for g in before.groups)
        n_bytes = self._state_bytes
        for i, tail in enumerate(tails):
            n_bytes += 0 if tail is None else self._n_padded(i, tail) * self._cell_bytes[i]
        data = CheckpointData(
            tails=tuple(
                None if x is None else self._device.take_kv(i, self._padded(i, x, x.index))
                for i, x in enumerate(tails)
            ),
            state=self._state(seq_id),
        )
        new = Checkpoint(pos=pos, tails=tails, n_bytes=n_bytes, data=data)
        kept = checkpoints.with_new(before.checkpoints, seq_id, new, self.limits)
        return dataclasses.replace(before, checkpoints=kept)

    def restored(
        self, after: CacheContents, saved: Sequence[CheckpointPart], sequences: Sequences
    ) -> CacheContents:
        """Contents with the saved checkpoints of some sequences, as many as are kept here.

        One that lacks a window which is dropped here is left out.
        """
        kept = after.checkpoints
        for part in sorted(saved, key=lambda x: x.pos):
            here = [sequences[s] for s in part.seq_ids if s in sequences]
            both = zip(part.tails, after.groups, strict=True)
            if here and all(tail is not None or not group.rolls for tail, group in both):
                new = self._checkpoint(part)
                for s in here:
                    kept = checkpoints.with_new(kept, s, new, self.limits)
        return dataclasses.replace(after, checkpoints=kept)

    def write(self, plan: RewindPlan, checkpoint: Checkpoint) -> None:
        """Writes the keys, values and state of a checkpoint to where a plan puts them."""
        data: CheckpointData = checkpoint.data
        for i, (tail, slots) in enumerate(zip(checkpoint.tails, plan.slots, strict=True)):
            kv = data.tails[i]
            if tail is not None and slots is not None and kv is not None:
                self._device.put_kv(i, self._padded(i, tail, slots), *kv)
        if data.state is not None and plan.state is not None:
            self._device.put_state(plan.state, data.state)

    def _checkpoint(self, part: CheckpointPart) -> Checkpoint:
        """A saved checkpoint on the device."""
        tails: list[SavedCells | None] = []
        kv: list[tuple[AnyKVArray, AnyKVArray] | None] = []
        n_bytes = self._state_bytes
        for i, tail in enumerate(part.tails):
            if tail is None:
                tails.append(None)
                kv.append(None)
                continue
            tails.append(SavedCells(**{x: getattr(tail, x) for x in _CELLS}))
            n = self._n_padded(i, tail)
            kv.append((_whole(tail.k, n), _whole(tail.v, n)))
            n_bytes += n * self._cell_bytes[i]
        state = None
        if part.state is not None:
            state = tuple(tuple(map(jnp.asarray, x)) for x in part.state)
        data = CheckpointData(tails=tuple(kv), state=state)
        return Checkpoint(pos=part.pos, tails=tuple(tails), n_bytes=n_bytes, data=data)

    def _state(self, seq_id: int) -> OneState | None:
        """A copy of the newest state of a sequence."""
        if self._host.states is None:
            return None
        return self._device.take_state(self._host.states.kept[seq_id][-1][1])

    def _padded(self, group: int, tail: SavedCells, slots: np.ndarray) -> np.ndarray:
        """Cells in one size for all checkpoints, so that one program does for all."""
        extent = self._host.groups[group].extent
        # Cells that are left out go behind the last one, where nothing is written. There may be
        # more cells here than in the cache that a session comes from.
        where = np.where(slots < extent.n_cells, slots, extent.n_slots).astype(np.int32)
        return pad(where, self._n_padded(group, tail), extent.n_slots)

    def _n_padded(self, group: int, tail: SavedCells) -> int:
        size = self._host.groups[group].group.mask.size
        return -(-max(len(tail.index), 1) // size) * size


def open_checkpoints(
    host: HostCells, device: Device, config: CacheConfig
) -> ContextCheckpoints | None:
    """The checkpoints of a cache; None where none are asked for or every layer keeps all.

    Raises:
      BadConfig: see `ContextCheckpoints`.
    """
    if not config.n_checkpoints or not (host.rolls or host.states is not None):
        return None
    return ContextCheckpoints(host, device, config)


def parts(held: Checkpoints) -> tuple[CheckpointPart, ...]:
    """Checkpoints as a session has them, shared ones once; no bytes are copied."""
    out = []
    for x in held.unique:
        tails = []
        for tail, kv in zip(x.tails, x.data.tails, strict=True):
            if tail is None or kv is None:
                tails.append(None)
                continue
            k, v = (kv_arrays.some(rows, slice(len(tail.index))) for rows in kv)
            tails.append(TailPart(**{f: getattr(tail, f) for f in _CELLS}, k=k, v=v))
        seqs = tuple(s for s, kept in sorted(held.kept.items()) if any(y is x for y in kept))
        out.append(CheckpointPart(pos=x.pos, seq_ids=seqs, tails=tuple(tails), state=x.data.state))
    return tuple(out)


def _whole(kv: AnyKVArray, n: int) -> AnyKVArray:
    """Keys or values of some cells, [L, m, H, D], padded to n."""

    def padded(x: AnyArray) -> Array:
        rest = [(0, n - x.shape[1]) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        return jnp.asarray(np.pad(np.asarray(x), rest))

    return jax.tree.map(padded, kv)

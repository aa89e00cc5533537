"""Context checkpoints of a cell cache: made at the end of a sequence, and resumed from.

Their bytes are copies on the device, made there before the next step can overwrite what they are
of; nothing waits for them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvrt.cache.kv_blocks import padded_block, put_cells, take_cells
from kvrt.cellcache.checkpoint import checkpoints
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint, CheckpointLimits, Checkpoints
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.host_cells import HostCells
from kvrt.cellcache.insert import InsertPlan, Sequences, window_tail
from kvrt.cellcache.saved import SavedCells
from kvrt.config import MAX_POS
from kvrt.options.cache import CacheConfig
from kvrt.paged.layout.checkpoints import check_budget
from kvrt.program.device import Device
from kvrt.program.estimate import one_checkpoint_bytes
from kvrt.session.snapshot import CheckpointPart, GroupPart, joined_block, map_kv, with_kv
from kvrt.store import kv as kv_store
from kvrt.store import recurrent
from kvrt.store.recurrent import OneState


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeviceCheckpoint(Checkpoint):
    """A checkpoint and its bytes.

    Attributes:
      tails: keys and values are one block, padded to whole windows.
      state: arrays of each recurrent layer's state; None without such layers.
    """

    tails: tuple[GroupPart | None, ...]
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
        check_budget(config, one_checkpoint_bytes(device.layout))

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
        tails = []
        for i, group in enumerate(before.groups):
            tail = window_tail(group, seq_id)
            size = 0 if tail is None else self._n_padded(i, tail)
            kv = tail and with_kv(tail, [take_cells(self._device, i, tail.index, size)])
            tails.append(kv)
        state = None
        if before.states is not None:
            state = self._device.take_state(before.states.kept[seq_id][-1][1])
        new = self._checkpoint(pos, tails, state)
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
                tails = [t and self._whole(i, t) for i, t in enumerate(part.tails)]
                new = self._checkpoint(part.pos, tails, jax.tree.map(jnp.asarray, part.state))
                for s in here:
                    kept = checkpoints.with_new(kept, s, new, self.limits)
        return dataclasses.replace(after, checkpoints=kept)

    def write(self, plan: InsertPlan, checkpoint: Checkpoint) -> None:
        """Writes the keys, values and state of a checkpoint to where a plan puts them."""
        assert isinstance(checkpoint, DeviceCheckpoint), "made here"
        for i, (tail, slots) in enumerate(zip(checkpoint.tails, plan.slots, strict=True)):
            if tail is not None and slots is not None:
                (block,) = tail.blocks
                put_cells(self._device, i, slots, block, block.n)
        if checkpoint.state is not None:
            for index in plan.states.values():
                self._device.put_state(index, checkpoint.state)

    def _checkpoint(
        self, pos: int, tails: Sequence[GroupPart | None], state: OneState | None
    ) -> DeviceCheckpoint:
        sizes = (x.blocks[0].n * n for x, n in zip(tails, self._cell_bytes, strict=True) if x)
        n_bytes = self._state_bytes + sum(sizes)
        return DeviceCheckpoint(pos=pos, tails=tuple(tails), state=state, n_bytes=n_bytes)

    def _whole(self, group: int, tail: GroupPart) -> GroupPart:
        """The tail of a saved checkpoint, on the device."""
        block = padded_block(joined_block(tail.blocks), self._n_padded(group, tail))
        return dataclasses.replace(tail, blocks=[map_kv(jnp.asarray, block)])

    def _n_padded(self, group: int, tail: SavedCells) -> int:
        """Cells in one size for all checkpoints, so that one program does for all."""
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
        assert isinstance(x, DeviceCheckpoint), "made here"
        tails = (t and with_kv(t, [t.blocks[0].some(slice(len(t.index)))]) for t in x.tails)
        seqs = tuple(s for s, kept in sorted(held.kept.items()) if any(y is x for y in kept))
        out.append(CheckpointPart(pos=x.pos, seq_ids=seqs, tails=tuple(tails), state=x.state))
    return tuple(out)

"""What the device is given of blocks: tables, cells and the places of each step's tokens."""

from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.cellcache.host_cells import Where
from kvrt.cells.edits import SeqEdit
from kvrt.cells.slots import Places, SeqBlocks, pad
from kvrt.paged.layout.spec import PagedPlan
from kvrt.paged.manager import BlockManager
from kvrt.paged.requests.copies import BlockCopy
from kvrt.paged.tables import BlockTables
from kvrt.policies import Drop
from kvrt.program.device import Device
from kvrt.serving.cache.pool_cells import PoolCells
from kvrt.serving.step_batch import StepBatch
from kvrt.sizes import rounded_up
from kvrt.store.recurrent import StateIndex


class PagedArrays:
    """Block tables of all groups and cells of all pools, kept as a block manager decides.

    Attributes:
      store_of: by pool with keys and values, the device's store.
    """

    def __init__(
        self,
        plan: PagedPlan,
        group_of: Sequence[int],
        manager: BlockManager,
        device: Device,
        n_seq_max: int,
        n_ctx_seq: int,
    ):
        """Empty.

        Args:
          plan: groups and pools.
          group_of: by group of the device's layout, the plan's group whose tables it has.
          manager: who holds which blocks.
          device: has the bytes.
          n_seq_max: sequences at once.
          n_ctx_seq: tokens of a sequence at most.
        """
        self._plan, self._group_of, self._manager, self._device = plan, group_of, manager, device
        self._layout = layout = device.layout
        self._tables = [
            BlockTables(group, n_seq_max, _n_entries(plan, g, n_ctx_seq))
            for g, group in enumerate(plan.groups)
        ]
        self._recurrent = [g for g, group in enumerate(plan.groups) if group.kind == "recurrent"]
        pools = (plan.groups[g].pool for g in group_of)
        self.store_of = dict(zip(pools, layout.store_of, strict=True))
        sizes = {p: layout.stores[s].extent for p, s in self.store_of.items()}
        self._cells = {
            p: PoolCells(size.n_blocks, size.block_size, n_seq_max) for p, size in sizes.items()
        }
        # Groups with keys and values, and the cells of their pool.
        self._attended = [(g, self._cells[plan.groups[g].pool]) for g in dict.fromkeys(group_of)]
        self._written: list[tuple[PoolCells, np.ndarray]] = []
        # By group, the blocks whose keys await their K-shift.
        self._moved = {g: np.zeros(sizes[plan.groups[g].pool].n_blocks, bool) for g in group_of}
        # Stores whose keys are quantized by channel in runs, and whether one may not go on.
        self._with_runs = {p: s for p, s in self.store_of.items() if layout.stores[s].run}
        self._let_go = False
        extend = device.spec.config.self_extend
        self._extends = extend is not None and extend.kind == "cache"

    # --- a sequence's blocks -------------------------------------------------------------------

    def update(self, seq_id: int, new: Sequence[Sequence[int]]) -> None:
        """Follows what the manager did for a sequence, which took new blocks."""
        gone = self._put(seq_id)
        for g, cells in self._attended:
            cells.leave(gone[g], seq_id)
            cells.take(np.array(new[g], np.int32))

    def adopt(self, seq_id: int, n_tokens: int) -> None:
        """The first n_tokens of a sequence are in blocks that others filled."""
        for g, cells in self._attended:
            cells.adopt(*self._tables[g].prefix_blocks(seq_id, n_tokens), n_tokens, seq_id)

    def fork(self, seq_id: int, n_tokens: int, copies: Sequence[BlockCopy]) -> None:
        """A new sequence has the first n_tokens of another, some of them in copies of blocks."""
        self._put(seq_id)
        self.adopt(seq_id, n_tokens)
        self.copy(copies)

    def fork_moved(self, src_id: int, seq_id: int, copies: Sequence[BlockCopy]) -> None:
        """As `fork`, of all tokens of a sequence some of which do not lie by their positions."""
        self._put(seq_id)
        for table in self._tables:
            table.fork(src_id, seq_id)
        for g, cells in self._attended:
            src, dst = self._tables[g].common(src_id, seq_id)
            cells.fork((src, src_id), (dst, seq_id))
            self._moved[g][dst] |= self._moved[g][src]
        self.copy(copies)

    def drop(self, seq_id: int, drop: Drop, n_past: int) -> None:
        """A sequence of n_past tokens drops some, and later ones move down."""
        rotates = self._device.spec.config.rope == "write"
        for g, cells in self._attended:
            # What slid out of a window is neither dropped nor moved.
            pos = self._tables[g].held(seq_id, np.arange(drop.p0, n_past, dtype=np.int32))
            slots = self._tables[g].slots(np.full(len(pos), seq_id, np.int32), pos)
            moved = pos >= drop.p0 + drop.n
            cells.drop(slots[~moved], slots[moved], drop.n, rotates=rotates)
            self._note_moved(g, slots[moved])
        self._manager.drop(seq_id, drop.n)
        for g, table in enumerate(self._tables):
            blocks, gap = self._manager.table(seq_id, g), self._manager.gap(seq_id, g)
            table.drop(seq_id, blocks, drop.p0, gap)
        self._let_go = True

    def extend(self, seq_id: int, edits: Sequence[SeqEdit], n_tokens: int) -> None:
        """The n_tokens of a sequence, all cells of its own, change their positions."""
        rotates = self._device.spec.config.rope == "write"
        index = np.arange(n_tokens, dtype=np.int32)
        for g, cells in self._attended:
            slots = self._tables[g].slots(np.full(n_tokens, seq_id, np.int32), index)
            cells.move(slots, edits, rotates=rotates)
            self._note_moved(g, slots)

    def clear(self, seq_id: int) -> None:
        """A sequence holds nothing any more."""
        for g, cells in self._attended:
            cells.leave(self._tables[g].blocks(seq_id), seq_id)
        for table in self._tables:
            table.clear(seq_id)
        self._let_go = True

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks on the device, all layers of a group's pool."""
        self._keep_runs(copies)
        for g in dict.fromkeys(c.group for c in copies):
            pairs = np.array([(c.src, c.dst) for c in copies if c.group == g], np.int32)
            if g in self._recurrent:
                self._device.copy_states(pairs[:, 0], pairs[:, 1])
                continue
            inside = np.arange(self._plan.groups[g].block_size, dtype=np.int32)
            src, dst = ((x[:, None] * len(inside) + inside).reshape(-1) for x in pairs.T)
            store = self.store_of[self._plan.groups[g].pool]
            self._device.copy_kv(store, src.astype(np.int32), dst.astype(np.int32))

    # --- a step's tokens -----------------------------------------------------------------------

    def place(self, step: StepBatch) -> Where:
        """Slots and blocks of a step's tokens, by group of the layout, and state indices."""
        self._written = []
        fresh = {p: c.fresh(step.n_lists + self._n_new(p, step)) for p, c in self._cells.items()}
        found = {g: self._places(g, step) for g, _ in self._attended}
        for g, places in found.items():
            # One group of a pool says it, for all.
            places["fresh"] = fresh.pop(self._plan.groups[g].pool, None)
        for pool, cells in self._cells.items():
            if cells.stale:
                self._device.upload(self.store_of[pool], cells.cells)
                cells.stale = False
        if any(cells.pending for cells in self._cells.values()):
            self._shift()
        return tuple(Places(**found[g]) for g in self._group_of), self._states(step)

    def append(self, step: StepBatch, stays: Bool[np.ndarray, " n"] | None = None) -> None:
        """The step that was placed wrote its tokens, or those of them that stay."""
        for cells, slots in self._written:
            cells.write(slots if stays is None else slots[stays], step.pos, step.seq_ids)

    def _keep_runs(self, copies: Sequence[BlockCopy] = ()) -> None:
        """Ends runs that no sequence goes on with, and that nothing is copied from."""
        if not (self._let_go and self._with_runs):
            return
        self._let_go = False
        for pool, store in self._with_runs.items():
            held = np.zeros(self._layout.stores[store].extent.n_blocks, bool)
            for g, group in enumerate(self._plan.groups):
                if group.pool == pool:
                    held[self._tables[g].all_blocks()] = True
            held[[c.src for c in copies if self._plan.groups[c.group].pool == pool]] = True
            self._device.keep_runs(store, held)

    def _put(self, seq_id: int) -> list[Int32[np.ndarray, " n"]]:
        """Takes over the block tables of a sequence; by group, the blocks that slid out."""
        manager = self._manager
        return [
            t.put(seq_id, manager.table(seq_id, g), manager.n_head(seq_id, g))
            for g, t in enumerate(self._tables)
        ]

    def _note_moved(self, g: int, slots: Int32[np.ndarray, " n"]) -> None:
        """Keys of a group await their K-shift, which rotates them as its layers do."""
        self._moved[g][slots // np.int32(self._plan.groups[g].block_size)] = True

    def _shift(self) -> None:
        """Runs the K-shift."""
        # JAX reads host arrays after the call returned.
        self._device.shift([self._moved[g].copy() for g in self._group_of])
        for cells in self._cells.values():
            cells.settle()
        # Others, for JAX may read these after that call returned.
        self._moved = {g: np.zeros_like(moved) for g, moved in self._moved.items()}

    def _n_new(self, pool: int, step: StepBatch) -> int:
        """Blocks that prompts may take in a step in all groups of a pool."""
        groups = self._plan.groups
        sizes = [groups[g].block_size for g, c in self._attended if c is self._cells[pool]]
        n = step.size - step.n_lists
        return (len(sizes) - 1) * step.n_lists + sum(n // b for b in sizes)

    def _places(self, g: int, step: StepBatch) -> dict:
        table, pool = self._tables[g], self._plan.groups[g].pool
        # Where tokens share positions, a token's place is by its number and not by its position.
        index = step.n_before if self._extends else step.pos
        slots, n = table.slots(step.seq_ids, index), step.n_single
        self._written.append((self._cells[pool], slots))
        tables, n_blocks = table.read(step.seq_ids[:n], index[:n], step.n_lists)
        lists = [table.block_list(c.seq_id, c.n_before) for c in step.prompts]
        read = np.array(list(dict.fromkeys(x for ids in lists for x in ids.tolist())), np.int32)
        blocks = step.read_blocks(read, slots, table.block_size)
        n_pool = self._layout.stores[self.store_of[pool]].extent.n_blocks
        return {
            "slots": step.spread(slots, len(self._cells[pool].cells.pos)),
            "blocks": pad(blocks, n_pool, 0),
            "n_blocks": np.asarray(len(blocks), np.int32),
            "seq_blocks": SeqBlocks(tables=tables, n_blocks=n_blocks),
        }

    def _states(self, step: StepBatch) -> StateIndex | None:
        if not self._recurrent:
            return None
        (g,) = self._recurrent
        table, b, none = self._tables[g], self._plan.groups[g].block_size, self._layout.n_states
        src, dst = [], []
        for c in step.chunks:
            to = table.block(c.seq_id, (c.end - 1) // b)
            of = table.block(c.seq_id, (c.start - 1) // b) if c.start else none
            src += [of, *[to] * (c.n - 1)]
            dst += [to] * c.n
        src, dst = (step.spread(np.array(x, np.int32), none) for x in (src, dst))
        return StateIndex(src=src, dst=dst)


def _n_entries(plan: PagedPlan, g: int, n_ctx_seq: int) -> int:
    """Entries of a sequence's table: all blocks, or a window's and a step's; rounded up."""
    group = plan.groups[g]
    n = -(-n_ctx_seq // group.block_size)
    if group.kind not in ("full", "recurrent"):
        n = min(n, plan.pools[group.pool].n_blocks)
    return rounded_up(n)

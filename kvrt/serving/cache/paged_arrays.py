"""What the device is given of blocks: tables, cells and the places of each step's tokens."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.cellcache.host_cells import Where
from kvrt.cells import Cells, apply, create
from kvrt.cells.edits import Remove, SeqEdit
from kvrt.cells.slots import Places, SeqBlocks, pad
from kvrt.paged.layout.spec import PagedGroup, PagedPlan
from kvrt.paged.manager import BlockManager
from kvrt.paged.requests.copies import BlockCopy
from kvrt.paged.tables import BlockTables
from kvrt.program.device import Device
from kvrt.serving.step_batch import StepBatch
from kvrt.sizes import rounded_up
from kvrt.store.recurrent import StateIndex


class PoolCells:
    """Positions and owners of one pool's cells, changed in place: a block at a time.

    The device's copy follows by itself where a step writes, and empties blocks that are taken (see
    `Places.fresh`). It has to be told of the rest: `stale`. Blocks that nobody holds may lag
    behind, for nothing reads them before they are taken or found again; not so where a block of
    the arrays has several, of which others are read.

    Attributes:
      cells: positions and owners.
      stale: whether the device's copy is out of date.
      pending: whether keys await their K-shift.
    """

    def __init__(self, n_cells: int, group: PagedGroup, n_seq_max: int):
        """All are empty, here and on the device; the group is any of those of the pool."""
        self.cells: Cells = create(n_cells, n_seq_max)
        self.stale = self.pending = False
        self._inside = np.arange(group.block_size, dtype=np.int32)
        self._first_cell, self._is_wide = np.int32(group.first_cell), group.n_span > 1
        self._fresh: list[int] = []

    def take(self, blocks: Int32[np.ndarray, " n"]) -> None:
        """Blocks were taken that nobody held: they are empty from the next step on."""
        if not self._is_wide:
            self._fresh += blocks.tolist()

    def adopt(
        self,
        blocks: Int32[np.ndarray, " n"],
        index: Int32[np.ndarray, " n"],
        n_tokens: int,
        seq_id: int,
    ) -> None:
        """A sequence holds blocks, the index-th of its own, that have tokens up to n_tokens."""
        if not len(blocks):
            return
        pos = self._within(index)
        here = pos < n_tokens
        which = self.which(blocks)[here]
        self.cells.pos[which] = pos[here]
        self.cells.seqs[which, seq_id >> 5] |= np.uint32(1 << (seq_id & 31))
        self._not_fresh(blocks)

    def fork(self, of: tuple[np.ndarray, int], to: tuple[np.ndarray, int]) -> None:
        """A sequence that has others' tokens holds blocks: theirs, or copies of those.

        Args:
          of: blocks of the sequence that it began with, and its number.
          to: in the same order its own blocks, and its number.
        """
        (src, mine), (dst, seq_id) = (self.which(of[0]), of[1]), (self.which(to[0]), to[1])
        here = (self.cells.seqs[src, mine >> 5] >> np.uint32(mine & 31)) & np.uint32(1) > 0
        src, dst = src[here], dst[here]
        self.cells.pos[dst], self.cells.delta[dst] = self.cells.pos[src], self.cells.delta[src]
        self.cells.seqs[dst, seq_id >> 5] |= np.uint32(1 << (seq_id & 31))
        self._not_fresh(to[0])

    def leave(self, blocks: Int32[np.ndarray, " n"], seq_id: int) -> None:
        """A sequence releases blocks."""
        if not len(blocks):
            return
        which = self.which(blocks)
        self.cells.seqs[which, seq_id >> 5] &= ~np.uint32(1 << (seq_id & 31))
        left = self.cells.seqs[which].any(axis=1)
        gone = which[~left]
        self.cells.pos[gone] = -1
        if self.pending:
            # Keys that are copied there before the K-shift are not to be rotated by it.
            self.cells.delta[gone], self.stale = 0, True
        # Another sequence lists what is shared, and must not show it to who gets this seq_id next.
        self.stale |= self._is_wide or bool(left.any())

    def edit(
        self, slots: Int32[np.ndarray, " n"], edits: Sequence[SeqEdit], *, rotates: bool
    ) -> Int32[np.ndarray, " m"]:
        """A sequence changed positions of some cells, all its own, or gave them up; those it has.

        With `rotates` the keys of those await their K-shift: `pending`.
        """
        old = self.cells.pos[slots]
        mine = Cells(pos=old, delta=np.zeros_like(old), seqs=np.ones((len(old), 1), np.uint32))
        for edit in edits:
            mine = apply(mine, dataclasses.replace(edit, seq_id=0))
        gone, moved = slots[mine.pos < 0], slots[mine.pos >= 0]
        self.cells.pos[slots] = mine.pos
        self.cells.seqs[gone], self.cells.delta[gone] = 0, 0
        if rotates:
            self.cells.delta[moved] += mine.delta[mine.pos >= 0]
            self.pending = True
        self.stale = True
        return moved

    def settle(self) -> None:
        """The K-shift ran."""
        self.cells.delta[:] = 0
        self.pending = False

    def write(
        self,
        slots: Int32[np.ndarray, " T"],
        pos: Int32[np.ndarray, " T"],
        seq_ids: Int32[np.ndarray, " T"],
    ) -> None:
        """A step wrote tokens, here as on the device."""
        self.cells.pos[slots] = pos
        self.cells.seqs[slots] = 0
        bits = np.left_shift(np.uint32(1), (seq_ids & 31).astype(np.uint32))
        self.cells.seqs[slots, seq_ids >> 5] = bits

    def fresh(self, size: int) -> Int32[np.ndarray, " F"] | None:
        """Blocks that the next step empties, padded; `stale` is set if they are too many.

        None where a block of the arrays has others' cells as well.
        """
        if self._is_wide:
            return None
        found, self._fresh = self._fresh, []
        out = np.full(size, len(self.cells.pos) // len(self._inside), np.int32)
        if len(found) > size:
            self.stale = True
            return out
        out[: len(found)] = found
        return out

    def which(self, blocks: np.ndarray) -> np.ndarray:
        """The cells of blocks."""
        return self._within(blocks) + self._first_cell

    def _within(self, index: np.ndarray) -> np.ndarray:
        return (index[:, None] * np.int32(len(self._inside)) + self._inside).reshape(-1)

    def _not_fresh(self, blocks: np.ndarray) -> None:
        """Blocks have others' tokens, which the device does not know of."""
        filled = set(blocks.tolist()) if self._fresh else set()
        self._fresh = [x for x in self._fresh if x not in filled]
        self.stale = True


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
        self._recurrent = [g for g, group in enumerate(plan.groups) if group.kind == "recurrent"]
        of_pool = {plan.groups[g].pool: plan.groups[g] for g in group_of}
        pools = (plan.groups[g].pool for g in group_of)
        self.store_of = dict(zip(pools, layout.store_of, strict=True))
        sizes = {p: layout.stores[s].extent for p, s in self.store_of.items()}
        n_array_blocks = {p: size.n_blocks for p, size in sizes.items()}
        self._tables = [
            BlockTables(
                group, n_seq_max, _n_entries(plan, g, n_ctx_seq), n_array_blocks.get(group.pool, 0)
            )
            for g, group in enumerate(plan.groups)
        ]
        self._cells = {
            p: PoolCells(size.n_slots, of_pool[p], n_seq_max) for p, size in sizes.items()
        }
        # Groups with keys and values, and the cells of their pool.
        self._attended = [(g, self._cells[plan.groups[g].pool]) for g in dict.fromkeys(group_of)]
        self._written: list[tuple[PoolCells, np.ndarray]] = []
        # By group, the blocks of the arrays with keys that await their K-shift.
        self._moved = {g: np.zeros(n_array_blocks[plan.groups[g].pool], bool) for g in group_of}
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
            if self._moved[g][self._tables[g].array_blocks(src)].any():
                self._moved[g][self._tables[g].array_blocks(dst)] = True
        self.copy(copies)

    def edit(self, seq_id: int, edits: Sequence[SeqEdit], n_tokens: int) -> None:
        """A sequence of n_tokens, all in cells of its own that move, changes positions."""
        if not edits:
            return
        rotates = self._device.spec.config.rope == "write"
        drops = [x for x in edits if isinstance(x, Remove)]
        first = drops[0].p0 if drops else 0
        for g, cells in self._attended:
            # What slid out of a window is neither dropped nor moved.
            index = self._tables[g].held(seq_id, np.arange(first, n_tokens, dtype=np.int32))
            slots = self._tables[g].slots(np.full(len(index), seq_id, np.int32), index)
            self._note_moved(g, cells.edit(slots, edits, rotates=rotates))
        if not drops:
            return
        self._manager.drop(seq_id, sum((x.p1 or 0) - x.p0 for x in drops))
        for g, table in enumerate(self._tables):
            blocks, gap = self._manager.table(seq_id, g), self._manager.gap(seq_id, g)
            table.drop(seq_id, blocks, first, gap)
        self._let_go = True

    def shrink(self, seq_id: int) -> None:
        """The manager took back what a sequence had in advance."""
        for g, table in enumerate(self._tables):
            table.shrink(seq_id, len(self._manager.table(seq_id, g)))

    def clear(self, seq_id: int) -> None:
        """A sequence holds nothing any more."""
        for g, cells in self._attended:
            cells.leave(self._tables[g].blocks(seq_id), seq_id)
        for table in self._tables:
            table.clear(seq_id)
        self._let_go = True

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks on the device, all layers of a group's pool."""
        if self._let_go and self._with_runs:
            self._keep_runs(copies)
        for g in dict.fromkeys(c.group for c in copies):
            pairs = np.array([(c.src, c.dst) for c in copies if c.group == g], np.int32)
            if g in self._recurrent:
                self._device.copy_states(pairs[:, 0], pairs[:, 1])
                continue
            pool = self._plan.groups[g].pool
            src, dst = map(self._cells[pool].which, pairs.T)
            self._device.copy_kv(self.store_of[pool], src, dst)

    # --- a step's tokens -----------------------------------------------------------------------

    def place(self, step: StepBatch) -> Where:
        """Slots and blocks of a step's tokens, by group of the layout, and state indices."""
        self._written = []
        # One group of a pool says it, for all.
        n_fresh = {p: step.n_lists + self._n_new(p, step) for p in self._cells}
        fresh = {p: c.fresh(n_fresh[p]) for p, c in self._cells.items()}
        pool = {g: self._plan.groups[g].pool for g, _ in self._attended}
        found = {g: self._places(g, step, fresh.pop(p, None)) for g, p in pool.items()}
        for pool, cells in self._cells.items():
            if cells.stale:
                self._device.upload(self.store_of[pool], cells.cells)
                cells.stale = False
        if any(cells.pending for cells in self._cells.values()):
            self._shift()
        states = self._states(step) if self._recurrent else None
        return tuple([found[g] for g in self._group_of]), states

    def append(self, step: StepBatch, stays: Bool[np.ndarray, " n"] | None = None) -> None:
        """The step that was placed wrote its tokens, or those of them that stay."""
        for cells, slots in self._written:
            cells.write(slots if stays is None else slots[stays], step.pos, step.seq_ids)

    def _keep_runs(self, copies: Sequence[BlockCopy]) -> None:
        """Ends runs that no sequence goes on with, and that nothing is copied from."""
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
        self._moved[g][slots // np.int32(self._tables[g].array_block)] = True

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

    def _places(self, g: int, step: StepBatch, fresh: np.ndarray | None) -> Places:
        table, pool = self._tables[g], self._plan.groups[g].pool
        # Where tokens share positions, a token's place is by its number and not by its position.
        index = step.n_before if self._extends else step.pos
        slots, n = table.slots(step.seq_ids, index), step.n_single
        self._written.append((self._cells[pool], slots))
        tables, n_blocks = table.read(step.seq_ids[:n], index[:n], step.n_lists)
        lists = [table.block_list(c.seq_id, c.n_before) for c in step.prompts]
        read = np.array(list(dict.fromkeys(x for ids in lists for x in ids.tolist())), np.int32)
        blocks = step.read_blocks(read, slots, table.array_block)
        n_pool = self._layout.stores[self.store_of[pool]].extent.n_blocks
        return Places(
            slots=step.spread(slots, len(self._cells[pool].cells.pos)),
            blocks=pad(blocks, n_pool, 0),
            n_blocks=np.asarray(len(blocks), np.int32),
            seq_blocks=SeqBlocks(tables=tables, n_blocks=n_blocks),
            fresh=fresh,
        )

    def _states(self, step: StepBatch) -> StateIndex:
        (g,) = self._recurrent
        table, none = self._tables[g], self._layout.n_states
        depth = self._plan.groups[g].depth
        src, dst = [], []
        for c in step.chunks:
            to = table.block(c.seq_id, c.n_before + c.n - 1)
            of = table.block(c.seq_id, c.n_before - 1) if c.n_before else none
            mine = [to] * c.n
            for i in range(1, min(depth, c.n)):
                mine[-1 - i] = table.block(c.seq_id, c.n_before + c.n - 1 - i)
            src += [of, *mine[:-1]]
            dst += mine
        src, dst = (step.spread(np.array(x, np.int32), none) for x in (src, dst))
        return StateIndex(src=src, dst=dst)


def _n_entries(plan: PagedPlan, g: int, n_ctx_seq: int) -> int:
    """Entries of a sequence's table: all blocks, or a window's and a step's; rounded up."""
    group = plan.groups[g]
    n = -(-n_ctx_seq // group.block_size)
    if group.kind not in ("full", "recurrent"):
        n = min(n, plan.pools[group.pool].n_blocks)
    return rounded_up(n)

"""The cache of an engine in blocks: a coordinator decides, tables and cells follow."""

import math
from collections.abc import Sequence

import numpy as np

from kvrt.config import CacheConfig
from kvrt.errors import CacheFull, CannotRewind
from kvrt.paged.copies import Copy
from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Hit
from kvrt.paged.layout.sizing import greatest
from kvrt.paged.layout.spec import NULL, PagedGroup, PagedPlan
from kvrt.paged.manager import BlockManager, BlockRules
from kvrt.paged.pool import BlockPool, BlockRemoved, BlockStored
from kvrt.paged.residency import Residency
from kvrt.paged.tables import BlockTables
from kvrt.program.batch import Places, Rows, pad
from kvrt.program.device import Device
from kvrt.program.layout import Layout
from kvrt.serving.cache.chunk_ends import Cuts
from kvrt.serving.cache.pool_cells import PoolCells
from kvrt.serving.metrics import PoolUse
from kvrt.serving.offload import TierConfig, Tiers
from kvrt.serving.request import State
from kvrt.serving.step_batch import Work
from kvrt.sizes import rounded_up
from kvrt.store.recurrent import StateIndex


class PagedSpace:
    """Rows for sequences, and blocks for their tokens; see `kvrt.serving.cache.base.Space`."""

    def __init__(
        self,
        plan: PagedPlan,
        layout: Layout,
        group_of: Sequence[int],
        device: Device,
        config: CacheConfig,
        *,
        n_batch: int,
        n_ctx_seq: int | None = None,
        caching: bool = True,
        hash_block_size: int | None = None,
        tiers: TierConfig | None = None,
        fingerprint: bytes = b"",
    ):
        """Empty.

        Args:
          plan: groups and pools.
          layout: the device's arrays.
          group_of: by group of the layout, the plan's group whose tables it has.
          device: runs copies.
          config: sizes.
          n_batch: tokens of a step at most.
          n_ctx_seq: tokens of a sequence at most; None is config.n_ctx.
          caching: whether requests find what others computed.
          hash_block_size: tokens that a hit may end at a multiple of, within a block; None is
            whole blocks.
          tiers: where blocks go beyond the device.
          fingerprint: of what blocks on a disk belong to.
        """
        self.n_rows = config.n_seq_max
        self._plan, self._layout, self._group_of = plan, layout, group_of
        self._device, self._n_ctx_seq = device, min(n_ctx_seq or config.n_ctx, config.n_ctx)
        self.pools = [BlockPool(p.n_blocks, caching=caching, events=True) for p in plan.pools]
        rules = BlockRules(
            caching=caching,
            hash_block_size=hash_block_size,
            partial=hash_block_size is not None,
            n_in_flight=n_batch,
            n_ctx=self._n_ctx_seq,
        )
        self.manager = BlockManager(plan.groups, self.pools, rules)
        self.n_max = greatest(self._fits_alone, self._n_ctx_seq)
        self._tables = [
            BlockTables(group, self.n_rows, self._n_entries(g))
            for g, group in enumerate(self.groups)
        ]
        self._recurrent = [g for g, group in enumerate(self.groups) if group.kind == "recurrent"]
        # By pool with rows, the device's store and the cells; the groups that have such rows.
        pools = [plan.groups[g].pool for g in group_of]
        self._store_of = dict(zip(pools, layout.store_of, strict=True))
        self._cells = {
            pool: PoolCells(size.n_blocks, size.block_size, self.n_rows)
            for pool, size in ((p, layout.stores[s].extent) for p, s in self._store_of.items())
        }
        self._attended = [(g, self._cells[plan.groups[g].pool]) for g in dict.fromkeys(group_of)]
        self._free = list(range(self.n_rows))[::-1]
        self._chains: dict[State, Chain] = {}
        self._hits: dict[State, Hit] = {}
        # Tokens that some layers had of a text: where a state was missing, and is worth keeping.
        self._junctions: dict[State, int] = {}
        self._written: list[tuple[PoolCells, np.ndarray]] = []
        self._cuts = self._cuts_of(n_batch, hash_block_size)
        self.residency = Residency()
        self.tiers: Tiers | None = None
        if tiers is not None:
            stores = [self._store_of.get(pool) for pool in range(len(self.pools))]
            ends = self._plan, stores, self.pools, self.manager, device
            self.tiers = Tiers(tiers, *ends, fingerprint)

    @property
    def groups(self) -> tuple[PagedGroup, ...]:
        """Groups with a table each, in the coordinator's order."""
        return self._plan.groups

    @property
    def n_free_rows(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """How full the fullest pool is."""
        return max((p.usage for p in self.pools), default=0.0)

    def pool_use(self) -> list[PoolUse]:
        """How full each pool is."""
        return [
            PoolUse(
                n_units=p.n_blocks - 1,
                n_free=p.n_free,
                n_cached=p.n_cached,
                n_evicted=p.n_evicted,
            )
            for p in self.pools
        ]

    # --- what the scheduler asks ---------------------------------------------------------------

    def hit(self, state: State) -> int | None:
        """See `Space.hit`."""
        chain = self._chain(state)
        hit = self.manager.find_hit(chain, read=state.request.cache)
        if not self.manager.is_ready(hit):
            return None
        if self.tiers and state.request.cache:
            more = self.tiers.promote(chain, hit)
            if more is None:
                return None
            if more:
                hit = self.manager.find_hit(chain)
        self._hits[state], self._junctions[state] = hit, hit.n_common
        return hit.n_tokens

    def admit(self, state: State, n_tokens: int, whole: int | None) -> int | None:
        """See `Space.admit`."""
        if not self._free:
            return None
        row, hit = self._free[-1], self._hits.pop(state)
        new = self.manager.allocate(row, n_tokens, chain=self._chains[state], hit=hit, whole=whole)
        if new is None:
            return None
        state.row = self._free.pop()
        self._take(row, new)
        for g, cells in self._attended:
            cells.adopt(*self._tables[g].prefix_blocks(row, hit.n_tokens), hit.n_tokens, row)
        self._note_use(self._chains[state], hit)
        return hit.n_tokens

    def capacity(self, row: int) -> int:
        """See `Space.capacity`."""
        return self.manager.n_capacity(row)

    def grow(self, row: int, n_tokens: int, n_computed: int) -> bool:
        """See `Space.grow`."""
        new = self.manager.allocate(row, n_tokens, n_settled=n_computed)
        if new is None:
            return False
        self._take(row, new)
        return True

    def cut(self, state: State, start: int, n: int) -> int:
        """See `Space.cut`."""
        if self._cuts is None:
            return n
        n_tokens = len(state.tokens)
        junction = self._junctions.get(state)
        sizes = {"n_prompt": state.n_prompt, "n_tokens": n_tokens}
        return self._cuts.cut(start, n, **sizes, junction=junction)

    def fork(self, src: State, dst: State, n_tokens: int) -> bool:
        """See `Space.fork`."""
        if not self._free or src.row is None:
            return False
        row, chain = self._free[-1], self._chain(src).copy()
        try:
            copies = self.manager.fork(src.row, row, n_tokens, chain=chain)
        except (CacheFull, CannotRewind):
            return False
        dst.row, self._chains[dst] = self._free.pop(), chain
        for g, table in enumerate(self._tables):
            table.put(row, self.manager.table(row, g))
        for g, cells in self._attended:
            cells.adopt(*self._tables[g].prefix_blocks(row, n_tokens), n_tokens, row)
        self._copy(copies)
        return True

    def release(self, row: int, state: State) -> None:
        """See `Space.release`."""
        for g, cells in self._attended:
            cells.leave(self._tables[g].blocks(row), row)
        for table in self._tables:
            table.clear(row)
        self.manager.free(row)
        self._free.append(row)

    def park(self, row: int, state: State) -> bool:
        """See `Space.park`: full blocks went to a tier as soon as they could be found."""
        if self.tiers is None:
            return False
        self.release(row, state)
        return True

    # --- what the engine asks ------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""
        self.manager.new_step()
        for pool in self.pools:
            for event in pool.take_events():
                if isinstance(event, BlockStored):
                    self.residency.born((event.group, x) for x in event.hashes)
                elif isinstance(event, BlockRemoved):
                    self.residency.gone([(event.group, event.hash)])
        if self.tiers:
            self.tiers.begin()

    def forget(self, state: State) -> None:
        """A state ended."""
        for known in (self._chains, self._hits, self._junctions):
            known.pop(state, None)

    def disown(self, state: State) -> None:
        """Lets nobody find the blocks of a state that has a row: what they hold is damaged."""
        assert state.row is not None, "a state that computed has a row"
        for g, group in enumerate(self.groups):
            held = self.manager.table(state.row, g)
            self.pools[group.pool].forget([block for block in held if block != NULL])

    def places(self, work: Work) -> tuple[tuple[Places, ...], StateIndex | None]:
        """Slots and blocks of a step's tokens, by group of the layout, and rows of states."""
        self._copy(self.manager.take_copies())
        self._written = []
        fresh = {p: c.fresh(work.n_rows + self._n_fresh(p, work)) for p, c in self._cells.items()}
        found = {g: self._places(g, work) for g, _ in self._attended}
        for g, places in found.items():
            pool = self.groups[g].pool
            # One group of a pool tells it, for all.
            places["fresh"] = fresh.pop(pool, None)
        for pool, cells in self._cells.items():
            if cells.stale:
                self._device.upload(self._store_of[pool], cells.cells)
                cells.stale = False
        return tuple(Places(**found[g]) for g in self._group_of), self._states(work)

    def wrote(self, work: Work) -> None:
        """The step ran: its tokens are there, and others may find them."""
        for cells, slots in self._written:
            cells.write(slots, work.pos, work.rows)
        fine, n = self.manager.block_size, len(work.decode)
        full = np.flatnonzero(work.pos[:n] % fine == fine - 1).tolist()
        for c in (*(work.decode[i] for i in full), *work.prompts):
            self._chain(c.state)
            found = self.manager.register(c.row, c.end)
            if self.tiers and found:
                self.tiers.store(found)

    # --- below ---------------------------------------------------------------------------------

    def _fits_alone(self, n_tokens: int) -> bool:
        peaks = self.manager.n_peak(n_tokens)
        return all(n < pool.n_blocks for n, pool in zip(peaks, self.pools, strict=True))

    def _n_entries(self, g: int) -> int:
        """Entries of a table row: all blocks, or those of a window and a step; rounded up."""
        group = self.groups[g]
        n = -(-self._n_ctx_seq // group.block_size)
        if group.kind not in ("full", "recurrent"):
            n = min(n, self.pools[group.pool].n_blocks)
        return rounded_up(n)

    def _cuts_of(self, n_batch: int, hash_size: int | None) -> Cuts | None:
        if not self._recurrent:
            return None
        size = math.lcm(*(g.block_size for g in self.groups))
        return Cuts(block_size=size, hash_size=hash_size, n_chunk=n_batch)

    def _chain(self, state: State) -> Chain:
        """The hashes of a state's text so far."""
        chain = self._chains.get(state)
        if chain is None:
            chain = Chain(self.manager.block_size, salt=state.request.salt)
            self._chains[state] = chain
        chain.extend(state.tokens[len(chain.tokens) :])
        return chain

    def _take(self, row: int, new: Sequence[Sequence[int]]) -> None:
        """Takes over what the coordinator did for a row, which took new blocks."""
        gone = [t.put(row, self.manager.table(row, g)) for g, t in enumerate(self._tables)]
        for g, cells in self._attended:
            cells.leave(gone[g], row)
            cells.take(np.array(new[g], np.int32))

    def _n_fresh(self, pool: int, work: Work) -> int:
        """Blocks that prompts may take in a step in all groups of a pool."""
        sizes = [self.groups[g].block_size for g, c in self._attended if c is self._cells[pool]]
        return (len(sizes) - 1) * work.n_rows + sum(work.n_prompt // b for b in sizes)

    def _note_use(self, chain: Chain, hit: Hit) -> None:
        for g, blocks in enumerate(hit.blocks):
            entries = chain.entries(self.groups[g].block_size // chain.block_size)
            # A block that a hit ends within is one of its own for what was found before it.
            whole = zip(entries, blocks, strict=False)
            self.residency.used((g, entry.digest) for entry, block in whole if block != NULL)

    def _places(self, g: int, work: Work) -> dict:
        table, pool = self._tables[g], self.groups[g].pool
        slots, n = table.slots(work.rows, work.pos), len(work.decode)
        self._written.append((self._cells[pool], slots))
        tables, n_blocks = table.read(work.rows[:n], work.pos[:n], work.n_rows)
        lists = [table.block_list(c.row, c.start) for c in work.prompts]
        blocks = list(dict.fromkeys(np.concatenate(lists).tolist())) if lists else []
        n_pool = self._layout.stores[self._store_of[pool]].extent.n_blocks
        return {
            "slots": work.spread(slots, len(self._cells[pool].cells.pos)),
            "blocks": pad(blocks, n_pool, 0),
            "n_blocks": np.asarray(len(blocks), np.int32),
            "rows": Rows(tables=tables, n_blocks=n_blocks),
        }

    def _states(self, work: Work) -> StateIndex | None:
        if not self._recurrent:
            return None
        (g,) = self._recurrent
        table, b, none = self._tables[g], self.groups[g].block_size, self._layout.n_states
        src, dst = [], []
        for c in work.chunks:
            to = table.block(c.row, (c.end - 1) // b)
            src += [table.block(c.row, (c.start - 1) // b) if c.start else none, *[to] * (c.n - 1)]
            dst += [to] * c.n
        src, dst = (work.spread(np.array(x, np.int32), none) for x in (src, dst))
        return StateIndex(src=src, dst=dst)

    def _copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks on the device, all layers of a group's pool."""
        for g in dict.fromkeys(c.group for c in copies):
            pairs = np.array([(c.src, c.dst) for c in copies if c.group == g], np.int32)
            if g in self._recurrent:
                self._device.copy_states(pairs[:, 0], pairs[:, 1])
                continue
            inside = np.arange(self.groups[g].block_size, dtype=np.int32)
            src, dst = ((x[:, None] * len(inside) + inside).reshape(-1) for x in pairs.T)
            store = self._store_of[self.groups[g].pool]
            self._device.copy_rows(store, src.astype(np.int32), dst.astype(np.int32))

"""Changes of tables, pools and copies, planned as a whole before anything is done.

The order is what others got wrong before: blocks that slid out of a window are freed first, then
all hits of all groups are held, then new blocks are taken, so no group can evict what another one
was about to use.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvrt.errors import CannotRewind
from kvrt.paged.copies import BlockCopy, Copies
from kvrt.paged.hashing import Chain, PrefixHash
from kvrt.paged.hits import Hit
from kvrt.paged.kinds import FullKind, ceil_div
from kvrt.paged.layout.spec import NULL
from kvrt.paged.pool import BlockPool
from kvrt.paged.promises import Promises
from kvrt.paged.request_blocks import RequestBlocks


class Registered(NamedTuple):
    """A block that can be found from now on."""

    group: int
    block: int
    entry: PrefixHash


class AllocationPlan(NamedTuple):
    """What making room for a request will do.

    Attributes:
      n_tokens: tokens that there will be room for.
      start: tokens that the step begins with.
      past: by group, table entries before it are no longer needed.
      slid: by group, indices of those that are blocks to give back, newest first.
      copied: by group, blocks at the end of a hit that are copied, for what comes changes them.
      moved: groups whose last block was taken in this step, for a state that it will not write.
      n_new: by group, blocks to take beside copies.
      need: by pool, blocks that leave the free queue.
      gain: by pool, blocks that come back to it before.
    """

    n_tokens: int
    start: int
    past: list[int]
    slid: list[list[int]]
    copied: list[int]
    moved: list[int]
    n_new: list[int]
    need: list[int]
    gain: list[int]


class Transactions:
    """Plans and commits changes of requests in the pools of all groups; never half of one."""

    def __init__(
        self,
        kinds: Sequence[FullKind],
        pools: Sequence[BlockPool],
        copies: Copies,
        promises: Promises,
    ):
        """For these groups and pools."""
        self._kinds, self._pools, self._copies = kinds, pools, copies
        self._promises = promises

    def plan(
        self,
        request: RequestBlocks,
        n_tokens: int,
        *,
        hit: Hit | None,
        n_settled: int | None,
        n_lookahead: int,
    ) -> AllocationPlan:
        """How a request gets room for n_tokens.

        Args:
          request: its tables are the hit's if it is new.
          n_tokens: in all.
          hit: what a new request begins with.
          n_settled: tokens whose keys and values are written, so that what they no longer need can
            be freed; None frees nothing.
          n_lookahead: drafts after n_tokens.
        """
        need = self._idle(hit) if hit else [0] * len(self._pools)
        gain, past, slid, n_new = [0] * len(self._pools), [], [], []
        copied = [0] * len(self._kinds)
        moved: list[int] = []
        start = request.n_tokens if n_settled is None else n_settled
        for g, kind in enumerate(self._kinds):
            p, table = kind.pool, request.tables[g]
            first, gone = self._slid(g, request, n_settled)
            gain[p] += self._pools[p].count([table[i] for i in gone], n_refs=1)
            past.append(first)
            slid.append(gone)
            n = kind.n_new(len(table), n_tokens, n_lookahead)
            if n and kind.keeps_states and len(table) > ceil_div(start, kind.block_size):
                moved.append(g)
                n = 0
            n_new.append(n)
            if hit and table:
                n_cut = min(hit.n_tokens % kind.block_size, 1)
                copied[g] = len(table) if _moves(hit, kind) else n_cut
            need[p] += n + copied[g]
        return AllocationPlan(n_tokens, start, past, slid, copied, moved, n_new, need, gain)

    def whole_need(
        self, request: RequestBlocks, hit: Hit | None, peaks: Sequence[int]
    ) -> list[int]:
        """By pool, blocks that a request takes until it has its peaks, which are by group."""
        out = self._idle(hit)
        for g, (kind, table) in enumerate(zip(self._kinds, request.tables, strict=True)):
            n_blocks = 0 if _moves(hit, kind) else sum(block != NULL for block in table)
            out[kind.pool] += max(peaks[g] - n_blocks, 0)
        return out

    def is_fresh(self, hit: Hit) -> bool:
        """Whether a block of a hit is written in this step."""
        return any(
            self._copies.is_fresh(kind.pool, block)
            for kind, blocks in zip(self._kinds, hit.blocks, strict=True)
            for block in blocks
        )

    def commit(
        self, request: RequestBlocks, plan: AllocationPlan, hit: Hit | None
    ) -> tuple[tuple[int, ...], ...]:
        """Does it, and returns the blocks taken, by group."""
        for g, kind in enumerate(self._kinds):
            if slid := plan.slid[g]:
                table = request.tables[g]
                self._pools[kind.pool].free([table[i] for i in slid])
                for i in slid:
                    table[i] = NULL
        request.first = plan.past
        if hit:
            for kind, blocks in zip(self._kinds, hit.blocks, strict=True):
                self._pools[kind.pool].touch(blocks)
        out: list[tuple[int, ...]] = []
        for g, kind in enumerate(self._kinds):
            table, new = request.tables[g], ()
            if kind.keeps_states:
                self._note_stale(request, g, plan.n_tokens, plan.start)
            if n := plan.copied[g]:
                new = self._copy_end(g, table, n)
            if g in plan.moved:
                block, table[-1] = table[-1], NULL
                table += kind.grown(table, plan.n_tokens, [block])
            if n := plan.n_new[g]:
                fresh = self._pools[kind.pool].take(n)
                table += kind.grown(table, plan.n_tokens, fresh)
                new += tuple(fresh)
            out.append(new)
        self._note_room(request, plan.n_tokens)
        return tuple(out)

    def register(
        self, request: RequestBlocks, chain: Chain, n_tokens: int, segment: int
    ) -> list[Registered]:
        """Lets full blocks of n_tokens be found; returns those. `segment` as in `serves_hit`."""
        n, starts = min(n_tokens, len(chain.tokens)), []
        out: list[Registered] = []
        for g, kind in enumerate(self._kinds):
            if not kind.has_blocks:
                continue
            b, pool, start = kind.block_size, self._pools[kind.pool], request.n_registered[g]
            end = max(min(n // kind.align * kind.align + kind.n_recomputed, n) // b, start)
            entries = chain.entries(b // chain.block_size)
            for i in range(start, end):
                block, known = request.tables[g][i], (g, i) not in request.stale
                if block != NULL and known and kind.serves_hit(i, segment, request.marks):
                    pool.register(block, g, entries[i])
                    out.append(Registered(g, block, entries[i]))
                    if kind.keeps_states:
                        self._copies.written(kind.pool, block)
            request.n_registered[g] = end
            starts.append((end + 1) * b)
        while request.parts and request.parts[0] <= n_tokens:
            self._register_part(request, chain, request.parts.pop(0), n_tokens)
        request.n_next = min([*starts, *request.parts], default=0)
        return out

    def shared_tables(self, src: RequestBlocks, n_tokens: int) -> list[list[int]]:
        """By group, the entries that a token after n_tokens may see, null before them.

        Raises:
          CannotRewind: one of them is gone.
        """
        return [self._shared_table(g, src, n_tokens) for g in range(len(self._kinds))]

    def own_from(
        self, tables: Sequence[Sequence[int]], n_tokens: int, n_shared: int | None
    ) -> list[int]:
        """By group, the first entry that a fork at n_tokens has a copy of; see `BlockManager.fork`.

        It writes in the block that n_tokens end within, if they do.
        """
        out = []
        for kind, table in zip(self._kinds, tables, strict=True):
            first = len(table) - (len(table) > 0 and n_tokens % kind.block_size > 0)
            if n_shared is not None and not kind.keeps_states:
                first = min(first, n_shared // kind.block_size)
            out.append(first)
        return out

    def own_copies(self, tables: Sequence[list[int]], own: Sequence[int]) -> list[BlockCopy]:
        """Holds blocks of tables for one request more, from `own` on in copies; what to copy."""
        out = []
        for g, (kind, table, first) in enumerate(zip(self._kinds, tables, own, strict=True)):
            p = kind.pool
            self._pools[p].touch(table[:first])
            for i in range(first, len(table)):
                if table[i] != NULL:
                    (block,) = self._pools[p].take(1)
                    out.append(BlockCopy(g, self._copies.source(p, table[i]), block))
                    table[i] = block
        return out

    def forked(
        self, src: RequestBlocks, tables: list[list[int]], n_tokens: int, chain: Chain | None
    ) -> RequestBlocks:
        """A request that begins with n_tokens of another one, in the blocks of tables."""
        n_full = [n_tokens // kind.block_size for kind in self._kinds]
        request = RequestBlocks(
            tables=tables,
            chain=chain,
            n_tokens=n_tokens,
            first=[0] * len(tables),
            n_registered=[min(x) for x in zip(src.n_registered, n_full, strict=True)],
            marks=src.marks,
            gaps=list(src.gaps),
        )
        self._note_room(request, n_tokens)
        return request

    def _slid(self, g: int, request: RequestBlocks, n_settled: int | None) -> tuple[int, list[int]]:
        """The first entry of a group that is still needed, and indices of blocks before it."""
        kind, first = self._kinds[g], request.first[g]
        end = kind.n_skipped(n_settled) // kind.block_size if kind.slides and n_settled else 0
        if end <= first:
            return first, []
        return end, [i for i in range(end - 1, first - 1, -1) if request.tables[g][i] != NULL]

    def _idle(self, hit: Hit | None) -> list[int]:
        """By pool, blocks of a hit that are free, so that they leave the free queue."""
        out = [0] * len(self._pools)
        for kind, blocks in zip(self._kinds, hit.blocks if hit else (), strict=hit is not None):
            out[kind.pool] += self._pools[kind.pool].count(blocks, n_refs=0)
        return out

    def _note_room(self, request: RequestBlocks, n_tokens: int) -> None:
        """Notes how many tokens there is room for."""
        request.n_tokens = max(request.n_tokens, n_tokens)
        pairs = zip(request.tables, self._kinds, strict=True)
        request.n_room = min(
            (len(t) * kind.block_size for t, kind in pairs if kind.has_blocks), default=None
        )

    def _note_stale(self, request: RequestBlocks, g: int, n_tokens: int, start: int) -> None:
        """Remembers a state that a step begins with, and leaves before the end of its block."""
        b = self._kinds[g].block_size
        index, inside = divmod(start, b)
        if inside and n_tokens > (index + 1) * b:
            request.stale.add((g, index))

    def _copy_end(self, g: int, table: list[int], n: int) -> tuple[int, ...]:
        """Replaces a table's last n blocks by copies; they stay referenced until they were read."""
        p, new = self._kinds[g].pool, []
        for i in range(len(table) - n, len(table)):
            (block,) = self._pools[p].take(1)
            self._pools[p].touch((block,))
            self._copies.add(p, BlockCopy(g, table[i], block))
            table[i] = block
            new.append(block)
        return tuple(new)

    def _saved(self, g: int, block: int) -> int:
        """A copy of a block, referenced by the pending copies alone."""
        p = self._kinds[g].pool
        (copy,) = self._pools[p].take(1)
        self._pools[p].touch((block,))
        self._copies.add(p, BlockCopy(g, block, copy))
        self._copies.written(p, copy)
        return copy

    def _register_part(self, request: RequestBlocks, chain: Chain, end: int, n_tokens: int) -> None:
        """Lets the block that token `end` lies within be found by the tokens up to there."""
        for g, kind in enumerate(self._kinds):
            index, inside = divmod(end, kind.block_size)
            if not kind.has_blocks or not inside or request.tables[g][index] == NULL:
                continue
            p, block = kind.pool, request.tables[g][index]
            first = index * kind.block_size // chain.block_size
            if kind.keeps_states:
                # The next token overwrites the state: others find a copy of it, for which no
                # running request is preempted.
                if end != n_tokens or self._pools[p].n_free <= self._promises.n_kept()[p]:
                    continue
                block = self._saved(g, block)
            self._pools[p].register(block, g, chain.part(first, inside // chain.block_size))

    def _shared_table(self, g: int, src: RequestBlocks, n_tokens: int) -> list[int]:
        kind, table = self._kinds[g], src.tables[g]
        if not kind.has_blocks:
            return []
        n_cells = n_tokens + (src.gaps[g] if src.gaps else 0)
        n_blocks = ceil_div(n_cells, kind.block_size)
        end = kind.n_skipped(n_tokens) // kind.block_size
        out = [NULL] * end + table[end:n_blocks]
        lost = NULL in out[end:]
        if kind.keeps_states:
            overwritten = n_tokens % kind.block_size > 0 and n_blocks < len(table)
            lost |= overwritten or (g, n_blocks - 1) in src.stale
        if lost:
            raise CannotRewind(
                f"a token after {n_tokens} needs what a {kind.group.kind} group no longer holds; "
                f"fork where the sequence ends, or compute {n_tokens} tokens again"
            )
        return out


def _moves(hit: Hit | None, kind: FullKind) -> bool:
    """Whether all blocks of a hit are copied because they will move; states have no positions."""
    return hit is not None and hit.copied and not kind.keeps_states

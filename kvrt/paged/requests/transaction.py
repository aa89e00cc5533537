"""Changes of tables, pools and copies, planned as a whole before anything is done.

The order is what others got wrong before: blocks that slid out of a window are freed first, then
all hits of all groups are held, then new blocks are taken, so no group can evict what another one
was about to use.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvrt.paged.hashing import Chain, PrefixHash
from kvrt.paged.hits import Hit
from kvrt.paged.kinds import FullKind, ceil_div
from kvrt.paged.layout.spec import NULL
from kvrt.paged.pool import BlockPool
from kvrt.paged.requests.copies import BlockCopy, Copies
from kvrt.paged.requests.forks import is_passing
from kvrt.paged.requests.promises import Promises
from kvrt.paged.requests.request_blocks import RequestBlocks
from kvrt.paged.rules import BlockRules


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
      n_spare: by group, further ones that a request which moves takes once and for all.
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
    n_spare: list[int]
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
        rules: BlockRules,
    ):
        """For these groups and pools."""
        self._kinds, self._pools, self._copies = kinds, pools, copies
        self._promises, self._n_in_flight = promises, rules.n_in_flight
        self._marked_states = rules.marked_states

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
        n_spare = self.n_spare(request, n_tokens)
        has_own = request.moving is not None and bool(request.spare)
        start = request.n_tokens if n_settled is None else n_settled
        for g, kind in enumerate(self._kinds):
            p, table = kind.pool, request.tables[g]
            first, gone = self._slid(g, request, n_settled)
            gain[p] += self._pools[p].count([table[i] for i in gone], n_refs=1)
            past.append(first)
            slid.append(gone)
            n = kind.n_new(len(table), request.cell(g, n_tokens), n_lookahead)
            if n and kind.keeps_states:
                n_there = ceil_div(request.cell(g, start), kind.block_size)
                if len(table) > n_there:
                    moved.append(g)
                    n = 0
            n_new.append(n)
            if hit and table:
                n_cut = min(hit.n_tokens % kind.block_size, 1)
                copied[g] = len(table) if _moves(hit, kind) else n_cut
            need[p] += (0 if has_own else n + n_spare[g]) + copied[g]
        return AllocationPlan(
            n_tokens, start, past, slid, copied, moved, n_new, n_spare, need, gain
        )

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
        for g, slid in enumerate(plan.slid):
            if slid:
                table = request.tables[g]
                self._give_back(request, g, [table[i] for i in slid])
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
                fresh = self._fresh(request, g, n)
                table += kind.grown(table, plan.n_tokens, fresh)
                new += tuple(fresh)
            out.append(new)
        if request.moving is not None and not request.spare:
            self.reserve(request, plan.n_spare)
        request.note_room(self._kinds, plan.n_tokens)
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
                marked = kind.keeps_states and self._marked_states
                regular = 0 if marked or is_passing(request.moving, kind) else segment
                if block != NULL and known and kind.serves_hit(i, regular, request.marks):
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

    def _slid(self, g: int, request: RequestBlocks, n_settled: int | None) -> tuple[int, list[int]]:
        """The first entry of a group that is still needed, and indices of blocks before it."""
        kind, first = self._kinds[g], request.first[g]
        if not kind.slides or not n_settled:
            return first, []
        n_skipped = kind.n_skipped(n_settled, request.moving)
        end, table = request.cell(g, n_skipped) // kind.block_size, request.tables[g]
        if end <= first:
            return first, []
        first = max(first, kind.n_head(request.moving))
        return end, [i for i in range(end - 1, first - 1, -1) if table[i] != NULL]

    def register_end(self, request: RequestBlocks, chain: Chain, n_tokens: int) -> None:
        """Lets the states after n_tokens be found, of a request that computes no more."""
        for g, kind in enumerate(self._kinds):
            b, table, fine = kind.block_size, request.tables[g], chain.block_size
            for end in range(n_tokens, max(n_tokens - kind.group.depth, 0), -1):
                index = (end - 1) // b
                if not kind.keeps_states or index >= len(table) or table[index] == NULL:
                    break
                entry = chain.part(index * b // fine, end // fine - index * b // fine)
                self._pools[kind.pool].register(table[index], g, entry)
                self._copies.written(kind.pool, table[index])

    def n_spared(self, request: RequestBlocks, n_tokens: int, n: int) -> int:
        """Of n tokens behind n_tokens, those that a moving request has blocks of its own for."""
        for g, kind in enumerate(self._kinds):
            if kind.has_blocks and not kind.keeps_states:
                own = len(request.tables[g]) + len(request.spare[g] if request.spare else ())
                n = min(n, own * kind.block_size - request.cell(g, n_tokens))
        return max(n, 0)

    def shrink(self, request: RequestBlocks, n_tokens: int) -> bool:
        """Gives back blocks of a request behind n_tokens; whether there were some."""
        request.n_tokens, has_shrunk = n_tokens, False
        for g, kind in enumerate(self._kinds):
            table = request.tables[g]
            n = ceil_div(request.cell(g, n_tokens), kind.block_size)
            if kind.has_blocks and not kind.keeps_states and len(table) > n:
                self._give_back(request, g, table[n:][::-1])
                del table[n:]
                has_shrunk = True
        request.note_room(self._kinds, 0)
        return has_shrunk

    def drop(self, request: RequestBlocks, n: int) -> None:
        """Takes n tokens after those that a request keeps out of its tables."""
        for g, kind in enumerate(self._kinds):
            self._give_back(request, g, request.drop(g, kind, n))
        request.note_room(self._kinds, 0)

    def reserve(self, request: RequestBlocks, n_blocks: Sequence[int]) -> None:
        """Takes blocks, by group, that a request which moves has no use for yet."""
        request.spare = [
            self._pools[kind.pool].take(n) for kind, n in zip(self._kinds, n_blocks, strict=True)
        ]

    def n_spare(self, request: RequestBlocks, n_tokens: int) -> list[int]:
        """By group, blocks that a request which moves has to reserve beside those for n_tokens."""
        out = [0] * len(self._kinds)
        if request.moving is None or request.spare:
            return out
        for g, kind in enumerate(self._kinds):
            n_hit = sum(block != NULL for block in request.tables[g])
            n_new = kind.n_new(len(request.tables[g]), request.cell(g, n_tokens), 0)
            n = kind.n_reserved(request.moving, self._n_in_flight) - n_hit - n_new
            out[g] = max(n, 0)
        return out

    def _fresh(self, request: RequestBlocks, g: int, n: int) -> list[int]:
        """Blocks for a table that grows: a request's own where it has reserved them."""
        if request.moving is not None and request.spare:
            return [request.spare[g].pop() for _ in range(n)]
        table = request.tables[g]
        return self._pools[self._kinds[g].pool].take(n, table[-1] if table else NULL)

    def _give_back(self, request: RequestBlocks, g: int, blocks: Sequence[int]) -> None:
        """Frees blocks of a table; what nobody else has or finds stays with who reserved it."""
        pool = self._pools[self._kinds[g].pool]
        if request.moving is not None and request.spare:
            own = [b for b in blocks if pool.n_refs(b) == 1 and not pool.keys(b)]
            request.spare[g] += own
            blocks = [b for b in blocks if b not in own]
        pool.free(blocks)

    def _idle(self, hit: Hit | None) -> list[int]:
        """By pool, blocks of a hit that are free, so that they leave the free queue."""
        out = [0] * len(self._pools)
        for kind, blocks in zip(self._kinds, hit.blocks if hit else (), strict=hit is not None):
            out[kind.pool] += self._pools[kind.pool].count(blocks, n_refs=0)
        return out

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


def _moves(hit: Hit | None, kind: FullKind) -> bool:
    """Whether all blocks of a hit are copied because they will move; states have no positions."""
    return hit is not None and hit.copied and not kind.keeps_states

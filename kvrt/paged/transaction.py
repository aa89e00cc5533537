"""Changes of tables, pools and copies at once, worked out before anything is done.

The order is what others got wrong before: what slid out is freed first, then all hits of all
groups are held, then blocks are taken, so no group can evict what another one was about to use.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvrt.errors import CannotRewind
from kvrt.paged.copies import Copies, Copy
from kvrt.paged.hashing import Chain, PrefixHash
from kvrt.paged.hits import Hit
from kvrt.paged.kinds import Full, ceil_div
from kvrt.paged.layout.spec import NULL
from kvrt.paged.pool import BlockPool
from kvrt.paged.request_blocks import Held


class Registered(NamedTuple):
    """A block that can be found from now on."""

    group: int
    block: int
    entry: PrefixHash


class Change(NamedTuple):
    """What making room for a request will do.

    Attributes:
      n_tokens: tokens that there will be room for.
      start: tokens that the step begins with.
      past: by group, table entries before it are no longer needed, but for what stays for good.
      slid: by group, indices of those that are blocks to give back, newest first.
      copied: groups whose last block is held in part, so that it is copied.
      moved: groups whose last block was taken in this step, for a state that it will not write.
      n_new: by group, blocks to take beside copies.
      need: by pool, blocks that leave the queue.
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


class Changer:
    """Changes requests in the pools of all groups; it never fails half way."""

    def __init__(self, managers: Sequence[Full], pools: Sequence[BlockPool], copies: Copies):
        """For these groups and pools."""
        self._managers, self._pools, self._copies = managers, pools, copies

    def plan(
        self, held: Held, n_tokens: int, *, hit: Hit | None, n_settled: int | None, n_lookahead: int
    ) -> Change:
        """How a request gets room for n_tokens.

        Args:
          held: the request; its tables are the hit's if it is new.
          n_tokens: in all.
          hit: what a new request begins with.
          n_settled: tokens whose rows are there, so that what they no longer need can go; None
            keeps all.
          n_lookahead: drafts after n_tokens.
        """
        n_pools = len(self._pools)
        need = self._idle(hit) if hit else [0] * n_pools
        gain, past, slid, n_new = [0] * n_pools, [], [], []
        copied: list[int] = []
        moved: list[int] = []
        start = held.n_tokens if n_settled is None else n_settled
        for g, m in enumerate(self._managers):
            p, table, first = m.pool, held.tables[g], held.first[g]
            gone = []
            if m.slides and n_settled:
                begin, end = m.past(n_settled, held.n_prompt)
                if end > first:
                    begin, first = max(begin, first), end
                    gone = [i for i in range(end - 1, begin - 1, -1) if table[i] != NULL]
                    gain[p] += self._pools[p].count([table[i] for i in gone], n_refs=1)
            past.append(first)
            slid.append(gone)
            n = m.n_new(len(table), n_tokens, n_lookahead)
            if n and m.keeps_states and len(table) > ceil_div(start, m.block_size):
                moved.append(g)
                n = 0
            n_new.append(n)
            if hit and table and hit.n_tokens % m.block_size:
                copied.append(g)
                n += 1
            need[p] += n
        return Change(n_tokens, start, past, slid, copied, moved, n_new, need, gain)

    def whole(self, held: Held, hit: Hit | None, peaks: Sequence[int]) -> list[int]:
        """By pool, what a request takes out of the queue until it holds its peaks, by group."""
        out = self._idle(hit)
        for g, (m, table) in enumerate(zip(self._managers, held.tables, strict=True)):
            n_held = sum(block != NULL for block in table)
            out[m.pool] += max(peaks[g] - n_held, 0)
        return out

    def is_fresh(self, hit: Hit) -> bool:
        """Whether a block of a hit is written in this step."""
        return any(
            self._copies.is_fresh(m.pool, block)
            for m, blocks in zip(self._managers, hit.blocks, strict=True)
            for block in blocks
        )

    def commit(self, held: Held, change: Change, hit: Hit | None) -> tuple[tuple[int, ...], ...]:
        """Does it, and returns the blocks taken, by group."""
        for g, m in enumerate(self._managers):
            if slid := change.slid[g]:
                table = held.tables[g]
                self._pools[m.pool].free([table[i] for i in slid])
                for i in slid:
                    table[i] = NULL
        held.first = change.past
        if hit:
            for m, blocks in zip(self._managers, hit.blocks, strict=True):
                self._pools[m.pool].touch(blocks)
        out: list[tuple[int, ...]] = []
        for g, m in enumerate(self._managers):
            table, new = held.tables[g], ()
            if m.keeps_states:
                self._note_stale(held, g, change.n_tokens, change.start)
            if g in change.copied:
                new = (self._copied(g, table),)
            if g in change.moved:
                block, table[-1] = table[-1], NULL
                table += m.grown(table, change.n_tokens, [block])
            if n := change.n_new[g]:
                fresh = self._pools[m.pool].take(n)
                table += m.grown(table, change.n_tokens, fresh)
                new += tuple(fresh)
            out.append(new)
        self._settle(held, change.n_tokens)
        return tuple(out)

    def register(self, held: Held, chain: Chain, n_tokens: int, segment: int) -> list[Registered]:
        """Lets full blocks of n_tokens be found, and returns those; `segment` as in `is_worth`."""
        n, starts = min(n_tokens, len(chain.tokens)), []
        out: list[Registered] = []
        for g, m in enumerate(self._managers):
            if not m.holds:
                continue
            b, pool, start = m.block_size, self._pools[m.pool], held.n_seen[g]
            end = max(min(n // m.align * m.align + m.n_redone, n) // b, start)
            entries = chain.entries(b // chain.block_size)
            for i in range(start, end):
                block, known = held.tables[g][i], (g, i) not in held.stale
                if block != NULL and known and m.is_worth(i, segment, held.marks):
                    pool.register(block, g, entries[i])
                    out.append(Registered(g, block, entries[i]))
                    if m.keeps_states:
                        self._copies.written(m.pool, block)
            held.n_seen[g] = end
            starts.append((end + 1) * b)
        while held.parts and held.parts[0] <= n_tokens:
            self._register_part(held, chain, held.parts.pop(0), n_tokens)
        held.n_next = min([*starts, *held.parts], default=0)
        return out

    def shared(self, src: Held, n_tokens: int) -> list[list[int]]:
        """By group, the entries that a token after n_tokens may see, null before them.

        Raises:
          CannotRewind: one of them is gone.
        """
        return [self._shared(g, src, n_tokens) for g in range(len(self._managers))]

    def cut(self, tables: Sequence[Sequence[int]], n_tokens: int) -> list[int]:
        """Groups in which n_tokens end within a block."""
        return [g for g, m in enumerate(self._managers) if tables[g] and n_tokens % m.block_size]

    def fork(
        self, src: Held, tables: list[list[int]], n_tokens: int, chain: Chain | None
    ) -> tuple[Held, list[Copy]]:
        """A request that holds these tables as well, and copies of the blocks it writes in."""
        out, cut = [], self.cut(tables, n_tokens)
        for g, m in enumerate(self._managers):
            p, table = m.pool, tables[g]
            self._pools[p].touch(table[:-1] if g in cut else table)
            if g in cut:
                (block,) = self._pools[p].take(1)
                out.append(Copy(g, self._copies.source(p, table[-1]), block))
                table[-1] = block
        n_full = [n_tokens // m.block_size for m in self._managers]
        held = Held(
            tables=tables,
            chain=chain,
            n_prompt=src.n_prompt,
            n_tokens=n_tokens,
            first=[0] * len(tables),
            n_seen=[min(x) for x in zip(src.n_seen, n_full, strict=True)],
            marks=src.marks,
        )
        self._settle(held, n_tokens)
        return held, out

    def _idle(self, hit: Hit | None) -> list[int]:
        """By pool, blocks of a hit that nobody holds, so that they leave the queue."""
        out = [0] * len(self._pools)
        for m, blocks in zip(self._managers, hit.blocks if hit else (), strict=hit is not None):
            out[m.pool] += self._pools[m.pool].count(blocks, n_refs=0)
        return out

    def _settle(self, held: Held, n_tokens: int) -> None:
        """Notes how many tokens there is room for."""
        held.n_tokens = max(held.n_tokens, n_tokens)
        pairs = zip(held.tables, self._managers, strict=True)
        held.n_room = min((len(t) * m.block_size for t, m in pairs if m.holds), default=None)

    def _note_stale(self, held: Held, g: int, n_tokens: int, start: int) -> None:
        """Remembers a state that a step begins with, and leaves before the end of its block."""
        b = self._managers[g].block_size
        index, inside = divmod(start, b)
        if inside and n_tokens > (index + 1) * b:
            held.stale.add((g, index))

    def _copied(self, g: int, table: list[int]) -> int:
        """Puts a copy in the place of a table's last block, which stays held until it was read."""
        p = self._managers[g].pool
        (block,) = self._pools[p].take(1)
        self._pools[p].touch((block,))
        self._copies.add(p, Copy(g, table[-1], block))
        table[-1] = block
        return block

    def _saved(self, g: int, block: int) -> int:
        """A copy of a block that nobody but the copies holds."""
        p = self._managers[g].pool
        (copy,) = self._pools[p].take(1)
        self._pools[p].touch((block,))
        self._copies.add(p, Copy(g, block, copy))
        self._copies.written(p, copy)
        return copy

    def _register_part(self, held: Held, chain: Chain, end: int, n_tokens: int) -> None:
        """Lets the block that token `end` lies within be found by the tokens up to there."""
        for g, m in enumerate(self._managers):
            index, inside = divmod(end, m.block_size)
            if not m.holds or not inside or held.tables[g][index] == NULL:
                continue
            p, block = m.pool, held.tables[g][index]
            first = index * m.block_size // chain.block_size
            if m.keeps_states:
                # The next token overwrites the state: what is found has to be a copy of it, and
                # a copy is not worth what a running request would have to give up for it.
                if end != n_tokens or not self._pools[p].n_free:
                    continue
                block = self._saved(g, block)
            self._pools[p].register(block, g, chain.part(first, inside // chain.block_size))

    def _shared(self, g: int, src: Held, n_tokens: int) -> list[int]:
        m, table = self._managers[g], src.tables[g]
        if not m.holds:
            return []
        n_blocks = ceil_div(n_tokens, m.block_size)
        start, end = m.past(n_tokens, src.n_prompt)
        out = [NULL if start <= i < end else table[i] for i in range(n_blocks)]
        lost = any(out[i] == NULL for i in range(n_blocks) if not start <= i < end)
        if m.keeps_states:
            overwritten = n_tokens % m.block_size > 0 and n_blocks < len(table)
            lost |= overwritten or (g, n_blocks - 1) in src.stale
        if lost:
            raise CannotRewind(
                f"a token after {n_tokens} needs what a {m.group.kind} group no longer holds; fork "
                f"where the sequence ends, or compute {n_tokens} tokens again"
            )
        return out

"""Block tables of all requests in all groups, from pools that groups may share.

Host only, and plain: a call that fails has changed nothing.

Source: vLLM's KV cache manager; arXiv:2309.06180.
"""

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Sequence

from kvrt.errors import BadConfig, BadRange, CacheFull, UsageError
from kvrt.paged.copies import BlockCopy, Copies
from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Finder, Hit, hit_sizes
from kvrt.paged.kinds import kind_of
from kvrt.paged.layout.spec import PagedGroup
from kvrt.paged.lookup import Findable
from kvrt.paged.pool import BlockPool
from kvrt.paged.request_blocks import RequestBlocks, begin_request
from kvrt.paged.transaction import AllocationPlan, Registered, Transactions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRules:
    """What a block manager allows and keeps.

    Attributes:
      n_in_flight: tokens of a step at most, drafts included.
      n_ctx: tokens of a request at most.
      caching: whether requests find what others computed.
      hash_block_size: tokens of a block of chains; None is the most that divides all blocks.
      partial: whether hits may end within a block, which is then copied.
      checkpoint_interval: of windows and states, hits that end at multiples of it are kept, in
        tokens; None is every multiple of `align`, 0 only the end of each prompt.
      n_lookahead: drafts of a request that every allocation leaves room for.
      drafts: groups of layers that draft tokens: the last block of a hit is computed again.
    """

    n_in_flight: int
    n_ctx: int
    caching: bool = True
    hash_block_size: int | None = None
    partial: bool = False
    checkpoint_interval: int | None = None
    n_lookahead: int = 0  # issue 20: speculative decoding
    drafts: Collection[int] = ()  # issue 20: draft heads and LayerSkip


class BlockManager:
    """Which request has which blocks.

    One step of an engine is: `new_step`; `find_hit` and `allocate` for each request of the step;
    `take_copies`, which run before the step; the step; `register` of what it computed.

    Attributes:
      block_size: tokens of a block of chains.
      align: hits are multiples of it, in tokens.
    """

    def __init__(self, groups: Sequence[PagedGroup], pools: Sequence[BlockPool], rules: BlockRules):
        """No request has blocks.

        Args:
          groups: in the order in which tables are given.
          pools: that their blocks come from, by `PagedGroup.pool`.
          rules: what is allowed and kept.

        Raises:
          BadConfig: sizes do not fit together.
        """
        _check_groups(groups, pools)
        _check_drafts(groups, rules.drafts)
        sizes = hit_sizes(groups, rules.hash_block_size, partial=rules.partial)
        self.block_size, self.align = sizes.fine, sizes.align
        self._pools, self._sizes, self._rules = pools, sizes, rules
        self._kinds = [
            kind_of(g, sizes.align, drafts=i in rules.drafts) for i, g in enumerate(groups)
        ]
        self._segment = _segment(groups, sizes.align, rules.checkpoint_interval)
        self._finder = Finder(self._kinds, pools, sizes)
        self._copies = Copies(pools)
        self._transactions = Transactions(self._kinds, pools, self._copies)
        self._requests: dict[Hashable, RequestBlocks] = {}

    def find_hit(self, chain: Chain, *, read: bool = True) -> Hit:
        """The cached prefix of a prompt; never all of it.

        Args:
          chain: prefix hashes of the prompt.
          read: False finds nothing, for requests that need the logits of every token.

        Raises:
          UsageError: the chain has blocks of another size.
        """
        return self._finder.find(chain) if self._rules.caching and read else self._finder.nothing

    def find_beyond(self, chain: Chain, pools: Sequence[Findable]) -> Hit:
        """As `find_hit`, where tiers have blocks as well; ids are those of `pools`."""
        return Finder(self._kinds, pools, self._sizes).find(chain)

    def is_ready(self, hit: Hit) -> bool:
        """Whether the blocks of a hit may be read now, and not only after this step."""
        return not self._transactions.is_fresh(hit)

    def allocate(
        self,
        request_id: Hashable,
        n_tokens: int,
        *,
        chain: Chain | None = None,
        hit: Hit | None = None,
        n_settled: int | None = None,
        whole: int | None = None,
    ) -> tuple[tuple[int, ...], ...] | None:
        """Makes room for n_tokens of a request in all, the hit included.

        Args:
          request_id: a new one begins with the hit.
          n_tokens: more than the hit; fewer than there is room for already changes nothing.
          chain: prefix hashes of a new request; without it nothing is registered.
          hit: what `find_hit` found of the chain just now.
          n_settled: tokens that are computed, so that what only they needed is freed; None frees
            nothing.
          whole: admission; there must be room for the peak of so many tokens.

        Returns:
          The blocks taken, by group; None if they do not fit or the hit is not ready.

        Raises:
          BadRange: n_tokens or n_settled is out of range.
          UsageError: the hit is out of date, or the request is not new.
        """
        request, plan = self._plan(request_id, n_tokens, chain, hit, n_settled)
        needs = [plan.need]
        if whole is not None:
            needs.append(self._transactions.whole_need(request, hit, self._peaks(whole)))
        for need in needs:
            for pool, n, gain in zip(self._pools, need, plan.gain, strict=True):
                if n > pool.n_free + gain:
                    return None
        if hit is not None and not self.is_ready(hit):
            return None
        out = self._transactions.commit(request, plan, hit)
        self._requests[request_id] = request
        return out

    def n_peak(self, n_tokens: int) -> tuple[int, ...]:
        """The most blocks of each pool that a request of n_tokens has at once."""
        out = [0] * len(self._pools)
        for m, n in zip(self._kinds, self._peaks(n_tokens), strict=True):
            out[m.pool] += n
        return tuple(out)

    def register(self, request_id: Hashable, n_tokens: int) -> list[Registered]:
        """Lets full blocks of the first n_tokens, all of them computed, be found by others.

        A state is found only where a step ended with its block; call this after each step.

        Returns:
          The blocks that can be found now and could not before, partial ones left out.

        Raises:
          BadRange: there is no room for so many.
        """
        request = self._get(request_id)
        if n_tokens < request.n_next:
            return []
        self._check_n(n_tokens, self.n_capacity(request_id), "registered")
        if not self._rules.caching or request.chain is None:
            return []
        return self._transactions.register(request, request.chain, n_tokens, self._segment)

    def keep_hits(self, request_id: Hashable, ends: Iterable[int]) -> None:
        """Keeps what hits need that end at some tokens of a request, rounded down to `align`."""
        request = self._get(request_id)
        marks = {n // self.align * self.align for n in ends} - {0}
        request.marks = tuple(sorted(marks.union(request.marks)))

    def free(self, request_id: Hashable) -> None:
        """Frees all blocks of a request, group by group, the newest block first."""
        request = self._get(request_id)
        for kind, table in zip(self._kinds, request.tables, strict=True):
            self._pools[kind.pool].free(table[::-1])
        del self._requests[request_id]

    def fork(
        self, src_id: Hashable, dst_id: Hashable, n_tokens: int, *, chain: Chain | None = None
    ) -> list[BlockCopy]:
        """Lets a new request begin with the first n_tokens of another; full blocks are shared.

        Args:
          src_id: whose tokens.
          dst_id: the new request.
          n_tokens: that are computed. With recurrent groups the state must be there: all that
            src has computed, or the end of a block that it still has.
          chain: of the new request; without it nothing is registered.

        Returns:
          Copies to run at once, of blocks that n_tokens lies within.

        Raises:
          BadRange: src has no room for so many.
          CacheFull: blocks for copies are lacking.
          CannotRewind: a window or state that a token after n_tokens needs is gone.
          UsageError: dst is not new.
        """
        src = self._get(src_id)
        if dst_id in self._requests:
            raise UsageError(f"request {dst_id!r} has blocks already; free it or name a new one")
        self._check_n(n_tokens, self.n_capacity(src_id), "forked")
        tables = self._transactions.shared_tables(src, n_tokens)
        need = [0] * len(self._pools)
        for g in self._transactions.cut_groups(tables, n_tokens):
            need[self._kinds[g].pool] += 1
        for pool, n in zip(self._pools, need, strict=True):
            if n > pool.n_free:
                raise CacheFull(
                    f"a fork at token {n_tokens} copies {n} blocks, {pool.n_free} of "
                    f"{pool.n_blocks - 1} are free; free a request or fork where a block ends"
                )
        self._requests[dst_id], copies = self._transactions.fork(src, tables, n_tokens, chain)
        return copies

    def drop(self, request_id: Hashable, p0: int, n: int) -> None:
        """Takes positions [p0, p0 + n) out of a request; later ones move down, but for their cells.

        The position p >= p0 then lies where p + gap lay, `gap` cells after those that stay. Blocks
        that hold dropped tokens alone go to the table's end, so that there is as much room as
        before, and the gap stays below two blocks. Blocks from p0 on must not be shared, nor found
        by others, and p0 is the same at each drop.

        Raises:
          UsageError: it has windows or states.
        """
        request = self._get(request_id)
        if any(kind.group.kind != "full" for kind in self._kinds):
            raise UsageError("tokens can be dropped from full groups alone")
        gaps = request.gaps or [0] * len(self._kinds)
        for g, kind in enumerate(self._kinds):
            table, b = request.tables[g], kind.block_size
            first, end = -(-p0 // b), (p0 + gaps[g] + n) // b
            if end > first:
                request.tables[g] = table[:first] + table[end:] + table[first:end]
            gaps[g] += n - max(end - first, 0) * b
        request.gaps = gaps

    def gap(self, request_id: Hashable, group: int) -> int:
        """Cells of dropped tokens in a group's table, before those that moved down."""
        gaps = self._get(request_id).gaps
        return gaps[group] if gaps else 0

    def n_capacity(self, request_id: Hashable) -> int:
        """Tokens that a request has room for before it has to allocate more."""
        n_room = self._get(request_id).n_room
        return self._rules.n_ctx if n_room is None else min(n_room, self._rules.n_ctx)

    def table(self, request_id: Hashable, group: int) -> Sequence[int]:
        """The block table of a request, null where freed or never needed; not to be changed."""
        target = self._kinds[group].group.target
        return self._get(request_id).tables[group if target is None else target]

    def take_copies(self) -> list[BlockCopy]:
        """Copies to run before the next step, in any order."""
        return self._copies.take()

    def new_step(self) -> None:
        """Begins a step: what the last one wrote may be read, copies taken before it have run."""
        self._copies.new_step()

    def _get(self, request_id: Hashable) -> RequestBlocks:
        if request_id not in self._requests:
            raise UsageError(f"request {request_id!r} has no blocks; allocate some for it first")
        return self._requests[request_id]

    def _check_n(self, n_tokens: int, n_max: int, what: str) -> None:
        if not 0 < n_tokens <= n_max:
            raise BadRange(f"{n_tokens} tokens to be {what}; from 1 to {n_max} can be")

    def _plan(
        self,
        request_id: Hashable,
        n_tokens: int,
        chain: Chain | None,
        hit: Hit | None,
        n_settled: int | None,
    ) -> tuple[RequestBlocks, AllocationPlan]:
        """The request, new or not, and what making room for it does."""
        n_ctx = self._rules.n_ctx
        self._check_n(n_tokens, n_ctx, "placed")
        request = self._requests.get(request_id)
        if request is None:
            request = begin_request(
                self._kinds, self._checked(hit), chain, self.block_size, self.align
            )
        elif hit is not None or chain is not None:
            raise UsageError(f"request {request_id!r} is running; hits and chains are for new ones")
        n_room = min(request.n_tokens if request.n_room is None else request.n_room, n_tokens)
        if not 0 <= (n_settled or 0) <= n_room or (hit and hit.n_tokens >= n_tokens):
            raise BadRange(
                f"{n_settled} tokens settled and a hit of {hit.n_tokens if hit else 0}, of "
                f"{n_tokens} to be placed; at most {n_room} are settled, and a hit is shorter"
            )
        n_lookahead = min(self._rules.n_lookahead, n_ctx - n_tokens)
        return request, self._transactions.plan(
            request, n_tokens, hit=hit, n_settled=n_settled, n_lookahead=n_lookahead
        )

    def _checked(self, hit: Hit | None) -> Hit:
        if hit is None:
            return self._finder.nothing
        if hit.n_tokens and hit.n_evicted != self._finder.n_evicted:
            raise UsageError("blocks were evicted since the hit was found; find it again")
        return hit

    def _peaks(self, n_tokens: int) -> list[int]:
        n, n_in_flight = min(n_tokens, self._rules.n_ctx), self._rules.n_in_flight
        # One end of a copy lies in no table, until the copy has run.
        return [
            kind.n_peak(n, n_in_flight)
            + (self._rules.partial and kind.has_blocks and kind.block_size > self.block_size)
            for kind in self._kinds
        ]


def _check_groups(groups: Sequence[PagedGroup], pools: Sequence[BlockPool]) -> None:
    for i, g in enumerate(groups):
        if not 0 <= g.pool < len(pools):
            raise BadConfig(f"group {i} takes blocks from pool {g.pool}; there are {len(pools)}")
        if g.target is not None:
            target = groups[g.target] if 0 <= g.target < len(groups) else g
            if target.kind == "shared" or target.block_size != g.block_size:
                raise BadConfig(
                    f"group {i} reads the blocks of group {g.target}; that must be another group "
                    f"that has some of its own, of {g.block_size} tokens"
                )


def _check_drafts(groups: Sequence[PagedGroup], drafts: Collection[int]) -> None:
    if any(not 0 <= i < len(groups) or groups[i].kind not in ("full", "window") for i in drafts):
        raise BadConfig(f"groups {sorted(drafts)} draft; only full groups and windows draft")


def _segment(groups: Sequence[PagedGroup], align: int, interval: int | None) -> int:
    """Hits that end at its multiples are kept, in tokens; 0 is none."""
    if interval is None:
        return align
    if interval < 0 or interval % align:
        raise BadConfig(
            f"checkpoint_interval is {interval} tokens; it must be a multiple of {align}, or 0"
        )
    if interval and not any(g.kind in ("window", "recurrent") for g in groups):
        raise BadConfig(
            f"checkpoint_interval is {interval} tokens without a window or a state; leave it out"
        )
    return interval

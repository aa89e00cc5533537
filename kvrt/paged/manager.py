"""Block tables of all requests in all groups, from pools that groups may share.

Host only, and plain: a call that fails has changed nothing.

Source: vLLM's KV cache manager; arXiv:2309.06180.
"""

from collections.abc import Hashable, Iterable, Sequence

from kvrt.errors import BadRange, CacheFull, UsageError
from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Finder, Hit, Wanted, hit_sizes
from kvrt.paged.kinds import FullKind, Moving, kind_of
from kvrt.paged.layout.spec import NULL, PagedGroup
from kvrt.paged.lookup import Findable
from kvrt.paged.pool import BlockPool
from kvrt.paged.requests.copies import BlockCopy, Copies
from kvrt.paged.requests.forks import Forks
from kvrt.paged.requests.promises import Promises
from kvrt.paged.requests.request_blocks import RequestBlocks, begin_request
from kvrt.paged.requests.transaction import AllocationPlan, Registered, Transactions
from kvrt.paged.rules import BlockRules, check_drafts, check_groups, segment_of


class BlockManager:
    """Which request has which blocks.

    One step of an engine is: `new_step`; `find_hit` and `allocate` for each request of the step;
    `take_copies`, which run before the step; the step; `register` of what it computed.

    Attributes:
      block_size: tokens of a block of chains.
      align: hits are multiples of it, in tokens.
      promises: blocks that are kept for somebody.
      has_plenty: whether requests get blocks in advance, see `BlockRules` and `shrink`.
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
        check_groups(groups, pools)
        check_drafts(groups, rules.drafts)
        sizes = hit_sizes(groups, rules.hash_block_size, partial=rules.partial)
        self.block_size, self.align = sizes.fine, sizes.align
        self._pools, self._sizes, self._rules = pools, sizes, rules
        self._kinds = [
            kind_of(g, sizes.align, drafts=i in rules.drafts) for i, g in enumerate(groups)
        ]
        self._segment = segment_of(groups, sizes.align, rules.checkpoint_interval)
        self._finder = Finder(self._kinds, pools, sizes)
        self._copies = Copies(pools)
        self.promises = Promises(self._kinds, pools)
        self._transactions = Transactions(self._kinds, pools, self._copies, self.promises, rules)
        self._forks = Forks(self._kinds, pools, self._copies)
        self._requests: dict[Hashable, RequestBlocks] = {}
        self.has_plenty = False

    def find_hit(self, chain: Chain, wanted: Wanted | None = None, *, read: bool = True) -> Hit:
        """The cached prefix of a prompt; never all of it.

        Args:
          chain: prefix hashes of the prompt, or of what of it others can have computed.
          wanted: who asks; None is one whose prompt is the chain's.
          read: False finds nothing, for requests that need the logits of every token.

        Raises:
          UsageError: the chain has blocks of another size.
        """
        if not (self._rules.caching and read):
            return self._finder.nothing
        return self._finder.find(chain, wanted or Wanted())

    def find_beyond(
        self, chain: Chain, pools: Sequence[Findable], wanted: Wanted | None = None
    ) -> Hit:
        """As `find_hit`, where tiers have blocks as well; ids are those of `pools`."""
        return Finder(self._kinds, pools, self._sizes).find(chain, wanted or Wanted())

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
        whole: int | Moving | None = None,
    ) -> tuple[tuple[int, ...], ...] | None:
        """Makes room for n_tokens of a request in all, the hit included.

        Args:
          request_id: a new one begins with the hit.
          n_tokens: more than the hit; fewer than there is room for already changes nothing.
          chain: prefix hashes of a new request; without it nothing is registered.
          hit: what `find_hit` found of the chain just now.
          n_settled: tokens that are computed, so that what only they needed is freed; None frees
            nothing.
          whole: admission; there must be room for the peak of so many tokens. A request that will
            drop tokens takes all that it will ever have, and is never refused later on.

        Returns:
          The blocks taken, by group; None if they do not fit or the hit is not ready.

        Raises:
          BadRange: n_tokens or n_settled is out of range.
          UsageError: the hit is out of date, or the request is not new.
        """
        moving = None if isinstance(whole, int) else whole
        request = self._begun(request_id, chain, hit, moving)
        plan = self._plan(request, n_tokens, hit, n_settled)
        needs = [plan.need]
        if isinstance(whole, int):
            needs.append(self._transactions.whole_need(request, hit, self._peaks(whole)))
        kept = self.promises.n_kept(request_id)
        for need in needs:
            for pool, n, gain, k in zip(self._pools, need, plan.gain, kept, strict=True):
                if n > pool.n_free + gain - k:
                    return None
        if hit is not None and not self.is_ready(hit):
            return None
        out = self._transactions.commit(request, plan, hit)
        self._requests[request_id] = request
        return out

    def reserve(self, request_id: Hashable, blocks: Sequence[int]) -> None:
        """Keeps so many blocks of each pool for a request in all, those that it has included.

        The caller has seen that there are enough: `Promises.n_spare`.
        """
        self.promises.reserve(request_id, self._get(request_id), blocks)

    def n_reserved(self, moving: Moving) -> tuple[int, ...]:
        """The blocks of each pool that a request which drops tokens takes, none of them shared."""
        n_in_flight = self._rules.n_in_flight
        return self._by_pool(
            [kind.n_reserved(moving, n_in_flight) + self._n_copied(kind) for kind in self._kinds]
        )

    def fits(self, n_blocks: Sequence[int]) -> bool:
        """Whether so many blocks of each pool could ever be there at once."""
        return all(n < pool.n_blocks for n, pool in zip(n_blocks, self._pools, strict=True))

    def has_room(self, n_tokens: int) -> bool:
        """Whether a request of n_tokens would fit now, none of them shared."""
        both = zip(self.n_peak(n_tokens), self._pools, strict=True)
        return all(n <= pool.n_free for n, pool in both)

    def n_peak(self, n_tokens: int, *, n_more: int = 0, n_shared: int = 0) -> tuple[int, ...]:
        """The most blocks of each pool that a request of n_tokens has at once.

        Args:
          n_tokens: of it.
          n_more: requests as long that are counted with it.
          n_shared: tokens at the beginning that all of them share.
        """
        out = [0] * len(self._pools)
        for kind, n in zip(self._kinds, self._peaks(n_tokens), strict=True):
            # Of a window no block is sure to stay, of a state none is shared for long.
            n_own = n - (n_shared // kind.block_size if kind.group.kind == "full" else 0)
            out[kind.pool] += n + n_more * n_own
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

    def register_end(self, request_id: Hashable, n_tokens: int) -> None:
        """Lets the states after n_tokens be found, of a request that computes no more."""
        chain = self._get(request_id).chain
        if self._rules.caching and chain is not None and n_tokens % chain.block_size == 0:
            self._transactions.register_end(self._get(request_id), chain, n_tokens)

    def shrink(self, request_id: Hashable, n_tokens: int) -> bool:
        """Takes back blocks that a request has in advance of n_tokens; whether there were some."""
        return self._transactions.shrink(self._get(request_id), n_tokens)

    def keep_hits(self, request_id: Hashable, ends: Iterable[int]) -> None:
        """Keeps what hits need that end at some tokens of a request, rounded down to `align`."""
        request = self._get(request_id)
        marks = {n // self.align * self.align for n in ends} - {0}
        request.marks = tuple(sorted(marks.union(request.marks)))
        if self.align == self.block_size:
            request.parts = sorted({*request.parts, *marks})

    def free(self, request_id: Hashable) -> None:
        """Frees all blocks of a request, group by group, the newest block first."""
        request = self._get(request_id)
        for kind, table in zip(self._kinds, request.tables, strict=True):
            self._pools[kind.pool].free(table[::-1])
        for kind, spare in zip(self._kinds, request.spare, strict=bool(request.spare)):
            self._pools[kind.pool].free(spare)
        self.promises.drop(request_id)
        del self._requests[request_id]

    def fork(
        self,
        src_id: Hashable,
        dst_id: Hashable,
        n_tokens: int,
        *,
        chain: Chain | None = None,
        n_shared: int | None = None,
        moving: Moving | None = None,
    ) -> list[BlockCopy]:
        """Lets a new request begin with the first n_tokens of another; full blocks are shared.

        Args:
          src_id: whose tokens.
          dst_id: the new request.
          n_tokens: that are computed and not dropped. With recurrent groups the state must be
            there: all that src has computed, or the end of a block that it still has.
          chain: of the new request; without it nothing is registered.
          n_shared: tokens at the beginning that never move; blocks that have others are copied,
            for one of the two will move those. None is all.
          moving: of a new request that will drop tokens, or has dropped some with the other; it
            takes all that it will ever have.

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
        tables = self._forks.shared_tables(src, n_tokens, moving)
        own = self._forks.own_from(tables, n_tokens, n_shared, moving)
        request = self._forks.forked(src, tables, n_tokens, chain, moving)
        more = self._transactions.n_spare(request, n_tokens)
        need = [0] * len(self._pools)
        for kind, table, first, n in zip(self._kinds, tables, own, more, strict=True):
            need[kind.pool] += sum(block != NULL for block in table[first:]) + n
        for pool, n, n_spare in zip(self._pools, need, self.promises.n_spare(), strict=True):
            if n > n_spare:
                raise CacheFull(
                    f"a fork at token {n_tokens} copies {n} blocks, {n_spare} of "
                    f"{pool.n_blocks - 1} are free; free a request or fork where a block ends"
                )
        copies = self._forks.own_copies(tables, own)
        if moving is not None:
            self._transactions.reserve(request, more)
        self._requests[dst_id] = request
        return copies

    def drop(self, request_id: Hashable, n: int) -> None:
        """Takes the n tokens after those that a request keeps out of it; later ones move down.

        Not so their cells: the position p >= n_keep then lies where p + gap lay, `gap` cells after
        those that stay, fewer than two blocks. Blocks that hold dropped tokens alone leave the
        table, and are the request's own to use again. Blocks from n_keep on must not be shared,
        nor found by others.

        Raises:
          UsageError: it was not admitted as one that drops tokens.
        """
        request = self._get(request_id)
        if request.moving is None:
            raise UsageError(
                f"request {request_id!r} drops {n} tokens, and keeps them by its admission; admit "
                "it with what it keeps"
            )
        self._transactions.drop(request, n)

    def n_head(self, request_id: Hashable, group: int) -> int:
        """Blocks at the beginning of a group's table that stay while later ones go."""
        return self._kinds[group].n_head(self._get(request_id).moving)

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

    def _begun(
        self, request_id: Hashable, chain: Chain | None, hit: Hit | None, moving: Moving | None
    ) -> RequestBlocks:
        """The request, new or not."""
        request = self._requests.get(request_id)
        if request is None:
            return begin_request(self._kinds, self._checked(hit), chain, self._sizes, moving)
        if hit is not None or chain is not None:
            raise UsageError(f"request {request_id!r} is running; hits and chains are for new ones")
        return request

    def _plan(
        self,
        request: RequestBlocks,
        n_tokens: int,
        hit: Hit | None,
        n_settled: int | None,
    ) -> AllocationPlan:
        """What making room for a request does."""
        n_ctx = self._rules.n_ctx
        self._check_n(n_tokens, n_ctx, "placed")
        n_room = min(request.n_tokens if request.n_room is None else request.n_room, n_tokens)
        if not 0 <= (n_settled or 0) <= n_room or (hit and hit.n_tokens >= n_tokens):
            raise BadRange(
                f"{n_settled} tokens settled and a hit of {hit.n_tokens if hit else 0}, of "
                f"{n_tokens} to be placed; at most {n_room} are settled, and a hit is shorter"
            )
        n_more = self._rules.n_in_advance
        if request.moving is not None:
            n_more = self._transactions.n_spared(request, n_tokens, n_more)
        elif not self.has_plenty:
            n_more = 0
        n_lookahead = min(max(self._rules.n_lookahead, n_more), n_ctx - n_tokens)
        return self._transactions.plan(
            request, n_tokens, hit=hit, n_settled=n_settled, n_lookahead=n_lookahead
        )

    def _checked(self, hit: Hit | None) -> Hit:
        if hit is None:
            return self._finder.nothing
        if hit.n_tokens and hit.n_evicted != self._finder.n_evicted:
            raise UsageError("blocks were evicted since the hit was found; find it again")
        return hit

    def _by_pool(self, n_blocks: Sequence[int]) -> tuple[int, ...]:
        out = [0] * len(self._pools)
        for kind, n in zip(self._kinds, n_blocks, strict=True):
            out[kind.pool] += n
        return tuple(out)

    def _peaks(self, n_tokens: int) -> list[int]:
        n, n_in_flight = min(n_tokens, self._rules.n_ctx), self._rules.n_in_flight
        return [kind.n_peak(n, n_in_flight) + self._n_copied(kind) for kind in self._kinds]

    def _n_copied(self, kind: FullKind) -> int:
        """Blocks of a request that lie in no table: one end of a copy, until that has run."""
        fine = self.block_size
        return int(self._rules.partial and kind.has_blocks and kind.block_size > fine)

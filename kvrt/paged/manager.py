"""Block tables of all requests in all groups, from pools that groups may share.

Host only, and plain: a call that fails has changed nothing.

Source: vLLM's KV cache manager; arXiv:2309.06180.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from kvrt.errors import BadConfig, BadRange, CacheFull, UsageError
from kvrt.paged.copies import Copies, Copy
from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Finder, Hit, geometry
from kvrt.paged.kinds import create
from kvrt.paged.layout.spec import PagedGroup
from kvrt.paged.lookup import Findable
from kvrt.paged.pool import BlockPool
from kvrt.paged.request_blocks import Held, opened
from kvrt.paged.transaction import Change, Changer, Registered


class BlockManager:
    """Who holds which blocks.

    One step of an engine is: `new_step`; `find_hit` and `allocate` for each request of the step;
    `take_copies`, which run before the step; the step; `register` of what it computed.

    Attributes:
      block_size: tokens of a block of chains.
      align: hits are multiples of it, in tokens.
    """

    def __init__(
        self,
        groups: Sequence[PagedGroup],
        pools: Sequence[BlockPool],
        *,
        caching: bool = True,
        hash_block_size: int | None = None,
        retention: int | None = None,
        n_in_flight: int,
        n_ctx: int,
        partial: bool = False,
        keep_prompt: Collection[int] = (),
        drafts: Collection[int] = (),
    ):
        """No request holds anything.

        Args:
          groups: in the order in which tables are given.
          pools: that their blocks come from, by `PagedGroup.pool`.
          caching: whether requests find what others computed.
          hash_block_size: tokens of a block of chains; None is the most that divides all blocks.
          retention: of windows and states, hits that end at multiples of it are kept, in tokens;
            None is every multiple of `align`, 0 only the end of each prompt.
          n_in_flight: tokens of a step at most, drafts included.
          n_ctx: tokens of a request at most.
          partial: whether hits may end within a block, which is then copied.
          keep_prompt: windows that slide over the answer alone, by group.
          drafts: groups of layers that draft tokens: the last block of a hit is computed again.

        Raises:
          BadConfig: sizes do not fit together.
        """
        _check_groups(groups, pools)
        _check_options(groups, keep_prompt, drafts)
        sizes = geometry(groups, hash_block_size, partial=partial)
        self.block_size, self.align = sizes.fine, sizes.align
        self._pools, self._sizes = pools, sizes
        self._managers = [
            create(g, sizes.align, keep_prompt=i in keep_prompt, drafts=i in drafts)
            for i, g in enumerate(groups)
        ]
        self._segment = _segment(groups, sizes.align, retention)
        self._finder = Finder(self._managers, pools, sizes)
        self._copies = Copies(pools)
        self._changer = Changer(self._managers, pools, self._copies)
        self._requests: dict[Hashable, Held] = {}
        self._caching, self._partial = caching, partial
        self._n_in_flight, self._n_ctx = n_in_flight, n_ctx
        self._n_asked = self._n_hit = 0

    def find_hit(self, chain: Chain, *, read: bool = True) -> Hit:
        """What is held already of a text; never all of it.

        Args:
          chain: the text.
          read: False finds nothing, for requests that need the logits of every token.

        Raises:
          UsageError: the chain has blocks of another size.
        """
        return self._finder.find(chain) if self._caching and read else self._finder.nothing

    def find_beyond(self, chain: Chain, pools: Sequence[Findable]) -> Hit:
        """As `find_hit`, where more can be found than the pools hold; ids are those of `pools`."""
        return Finder(self._managers, pools, self._sizes).find(chain)

    def is_ready(self, hit: Hit) -> bool:
        """Whether what was found may be read now, and not only after this step."""
        return not self._changer.is_fresh(hit)

    def allocate(
        self,
        request_id: Hashable,
        n_tokens: int,
        *,
        chain: Chain | None = None,
        hit: Hit | None = None,
        n_settled: int | None = None,
        n_lookahead: int = 0,
        whole: int | None = None,
        n_reserved: int = 0,
    ) -> tuple[tuple[int, ...], ...] | None:
        """Makes room for n_tokens of a request in all, the hit included.

        Args:
          request_id: a new one begins with the hit.
          n_tokens: more than the hit; fewer than there is room for already changes nothing.
          chain: what a new request will hold; without it nothing is registered.
          hit: what `find_hit` said of the chain just now.
          n_settled: tokens whose rows are there, so that what only they needed is freed; None
            frees nothing.
          n_lookahead: drafts after n_tokens.
          whole: admission; there must be room for the most that so many tokens hold at once.
          n_reserved: blocks of each pool to leave alone.

        Returns:
          The blocks taken, by group; None if they do not fit, or if the hit was written in this
          very step.

        Raises:
          BadRange: n_tokens or n_settled is out of range.
          UsageError: the hit is out of date, or the request is not new.
        """
        held, change = self._change(request_id, n_tokens, chain, hit, n_settled, n_lookahead)
        needs = [change.need]
        if whole is not None:
            needs.append(self._changer.whole(held, hit, self._peaks(whole)))
        for need in needs:
            for pool, n, gain in zip(self._pools, need, change.gain, strict=True):
                if n > pool.n_free + gain - n_reserved:
                    return None
        if hit is not None and not self.is_ready(hit):
            return None
        out = self._changer.commit(held, change, hit)
        if request_id not in self._requests:
            self._requests[request_id] = held
            self._n_asked += held.n_prompt
            self._n_hit += hit.n_tokens if hit else 0
        return out

    def n_needed(
        self,
        request_id: Hashable,
        n_tokens: int,
        *,
        hit: Hit | None = None,
        n_settled: int | None = None,
        n_lookahead: int = 0,
    ) -> tuple[int, ...]:
        """Blocks that `allocate` would take out of each pool's queue."""
        _, change = self._change(request_id, n_tokens, None, hit, n_settled, n_lookahead)
        return tuple(change.need)

    def n_peak(self, n_tokens: int) -> tuple[int, ...]:
        """The most blocks of each pool that a request of n_tokens holds at once."""
        out = [0] * len(self._pools)
        for m, n in zip(self._managers, self._peaks(n_tokens), strict=True):
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
        held = self._get(request_id)
        if n_tokens < held.n_next:
            return []
        self._check_n(n_tokens, self.n_capacity(request_id), "registered")
        if not self._caching or held.chain is None:
            return []
        return self._changer.register(held, held.chain, n_tokens, self._segment)

    def free(self, request_id: Hashable) -> None:
        """Gives back all of a request, group by group, the newest block first."""
        held = self._get(request_id)
        for m, table in zip(self._managers, held.tables, strict=True):
            self._pools[m.pool].free(table[::-1])
        del self._requests[request_id]

    def fork(
        self, src_id: Hashable, dst_id: Hashable, n_tokens: int, *, chain: Chain | None = None
    ) -> list[Copy]:
        """Lets a new request begin with the first n_tokens of another; full blocks are shared.

        Args:
          src_id: whose tokens.
          dst_id: the new request.
          n_tokens: that are computed. With recurrent groups the state must be there: all that
            src has computed, or the end of a block that it still holds.
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
            raise UsageError(f"request {dst_id!r} holds blocks already; free it or name a new one")
        self._check_n(n_tokens, self.n_capacity(src_id), "forked")
        tables = self._changer.shared(src, n_tokens)
        need = [0] * len(self._pools)
        for g in self._changer.cut(tables, n_tokens):
            need[self._managers[g].pool] += 1
        for pool, n in zip(self._pools, need, strict=True):
            if n > pool.n_free:
                raise CacheFull(
                    f"a fork at token {n_tokens} copies {n} blocks, {pool.n_free} of "
                    f"{pool.n_blocks - 1} are free; free a request or fork where a block ends"
                )
        self._requests[dst_id], copies = self._changer.fork(src, tables, n_tokens, chain)
        return copies

    def n_capacity(self, request_id: Hashable) -> int:
        """Tokens that a request may hold before it has to ask for more."""
        n_room = self._get(request_id).n_room
        return self._n_ctx if n_room is None else min(n_room, self._n_ctx)

    def table(self, request_id: Hashable, group: int) -> Sequence[int]:
        """Blocks of a request by position, null where freed or passed over; not to be changed."""
        target = self._managers[group].group.target
        return self._get(request_id).tables[group if target is None else target]

    def take_copies(self) -> list[Copy]:
        """Copies to run before the next step, in any order."""
        return self._copies.take()

    def new_step(self) -> None:
        """Begins a step: what the last one wrote may be read, copies taken before it have run."""
        self._copies.new_step()

    def reset(self) -> bool:
        """Forgets all that can be found, if nobody holds a block; says whether it did."""
        if any(p.n_free < p.n_blocks - 1 for p in self._pools):
            return False
        return all([p.reset() for p in self._pools])

    def metrics(self) -> dict[str, Any]:
        """Counts since the beginning, and how full each pool is."""
        return {
            "n_requests": len(self._requests),
            "n_asked": self._n_asked,
            "n_hit": self._n_hit,
            "usage": [p.usage for p in self._pools],
            "n_free": [p.n_free for p in self._pools],
            "n_cached": [p.n_cached for p in self._pools],
            "n_evicted": [p.n_evicted for p in self._pools],
        }

    def _get(self, request_id: Hashable) -> Held:
        if request_id not in self._requests:
            raise UsageError(f"request {request_id!r} holds nothing; allocate blocks for it first")
        return self._requests[request_id]

    def _check_n(self, n_tokens: int, n_max: int, what: str) -> None:
        if not 0 < n_tokens <= n_max:
            raise BadRange(f"{n_tokens} tokens to be {what}; from 1 to {n_max} can be")

    def _change(
        self,
        request_id: Hashable,
        n_tokens: int,
        chain: Chain | None,
        hit: Hit | None,
        n_settled: int | None,
        n_lookahead: int,
    ) -> tuple[Held, Change]:
        """The request, new or not, and what making room for it does."""
        self._check_n(n_tokens, self._n_ctx, "placed")
        held = self._requests.get(request_id)
        if held is None:
            held = opened(self._managers, self._checked(hit), chain, self.block_size, self.align)
        elif hit is not None or chain is not None:
            raise UsageError(f"request {request_id!r} is running; hits and chains are for new ones")
        n_held = min(held.n_tokens if held.n_room is None else held.n_room, n_tokens)
        if not 0 <= (n_settled or 0) <= n_held or (hit and hit.n_tokens >= n_tokens):
            raise BadRange(
                f"{n_settled} tokens settled and {hit.n_tokens if hit else 0} found, of {n_tokens} "
                f"to be placed; at most {n_held} are settled, and fewer than all found"
            )
        n_lookahead = min(n_lookahead, self._n_ctx - n_tokens)
        return held, self._changer.plan(
            held, n_tokens, hit=hit, n_settled=n_settled, n_lookahead=n_lookahead
        )

    def _checked(self, hit: Hit | None) -> Hit:
        if hit is None:
            return self._finder.nothing
        if hit.n_tokens and hit.n_evicted != self._finder.n_evicted:
            raise UsageError("blocks were evicted since the hit was found; find it again")
        return hit

    def _peaks(self, n_tokens: int) -> list[int]:
        n = min(n_tokens, self._n_ctx)
        # One end of a copy lies in no table, until the copy has run.
        return [
            m.n_peak(n, self._n_in_flight)
            + (self._partial and m.holds and m.block_size > self.block_size)
            for m in self._managers
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


def _check_options(
    groups: Sequence[PagedGroup], keep_prompt: Collection[int], drafts: Collection[int]
) -> None:
    for chosen, kinds in ((keep_prompt, ("window",)), (drafts, ("full", "window"))):
        if any(not 0 <= i < len(groups) or groups[i].kind not in kinds for i in chosen):
            raise BadConfig(
                f"groups {sorted(chosen)} keep prompts or draft; only windows keep prompts, and "
                "only full groups and windows draft"
            )


def _segment(groups: Sequence[PagedGroup], align: int, retention: int | None) -> int:
    """Hits that end at its multiples are kept, in tokens; 0 is none."""
    if retention is None:
        return align
    if retention < 0 or retention % align:
        raise BadConfig(f"retention of {retention} tokens; it must be a multiple of {align}, or 0")
    if retention and not any(g.kind in ("window", "recurrent") for g in groups):
        raise BadConfig(f"retention of {retention} tokens without a window or a state; leave it")
    return retention

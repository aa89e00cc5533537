"""Blocks that are kept: reserved by requests that have not taken them yet, or held by pins.

A reservation is a number of blocks of each pool that a request will hold at once, those that it
holds included. So what is kept free for it falls as it grows, and rises where blocks slide out of
it. A pin holds the blocks of a hit, as a request does that begins with it.
"""

from collections.abc import Hashable, Sequence

from kvrt.errors import CacheFull
from kvrt.paged.hits import Hit
from kvrt.paged.kinds import FullKind
from kvrt.paged.layout.spec import NULL
from kvrt.paged.pool import BlockPool
from kvrt.paged.requests.request_blocks import RequestBlocks


class Promises:
    """What is kept for whom, in pools that groups of these kinds share."""

    def __init__(self, kinds: Sequence[FullKind], pools: Sequence[BlockPool]):
        """Nothing is kept."""
        self._kinds, self._pools = kinds, pools
        self._reserved: dict[Hashable, tuple[RequestBlocks, Sequence[int]]] = {}
        self._hits: dict[Hashable, Hit] = {}
        self._n_hits = 0

    # --- reservations --------------------------------------------------------------------------

    def reserve(self, request_id: Hashable, request: RequestBlocks, blocks: Sequence[int]) -> None:
        """Reserves blocks of each pool for a request, in place of what it had reserved."""
        self._reserved[request_id] = (request, blocks)

    def drop(self, request_id: Hashable) -> None:
        """A request has reserved nothing any more."""
        self._reserved.pop(request_id, None)

    def n_kept(self, asks: Hashable = None) -> list[int]:
        """By pool, free blocks that are kept for requests but the one that asks."""
        out = [0] * len(self._pools)
        if not self._reserved:
            return out
        for request_id, (request, blocks) in self._reserved.items():
            if request_id != asks:
                held = self._n_blocks(request)
                out = [n + max(b - h, 0) for n, b, h in zip(out, blocks, held, strict=True)]
        return out

    def n_spare(self) -> list[int]:
        """By pool, free blocks that are kept for nobody."""
        return [pool.n_free - n for pool, n in zip(self._pools, self.n_kept(), strict=True)]

    def spares(self, blocks: Sequence[int]) -> bool:
        """Whether so many blocks of each pool are free and kept for nobody."""
        return all(n <= n_spare for n, n_spare in zip(blocks, self.n_spare(), strict=True))

    # --- pins ----------------------------------------------------------------------------------

    def hold(self, hit: Hit) -> Hashable:
        """Holds the blocks of a hit, which was found just now; the handle for `let_go`.

        Raises:
          CacheFull: some of them are free, and reserved.
        """
        need = [0] * len(self._pools)
        for kind, blocks in zip(self._kinds, hit.blocks, strict=True):
            need[kind.pool] += self._pools[kind.pool].count(blocks, n_refs=0)
        for pool, n, n_spare in zip(self._pools, need, self.n_spare(), strict=True):
            if n > n_spare:
                raise CacheFull(
                    f"to pin {hit.n_tokens} tokens takes {n} free blocks, {n_spare} of "
                    f"{pool.n_blocks - 1} are free and not reserved; wait for a request to end"
                )
        for kind, blocks in zip(self._kinds, hit.blocks, strict=True):
            self._pools[kind.pool].touch(blocks)
        self._n_hits += 1
        self._hits[self._n_hits] = hit
        return self._n_hits

    def let_go(self, handle: Hashable) -> None:
        """Ends a `hold`."""
        hit = self._hits.pop(handle)
        for kind, blocks in zip(self._kinds, hit.blocks, strict=True):
            self._pools[kind.pool].free(blocks[::-1])

    def n_held(self) -> list[int]:
        """By pool, blocks that pins hold."""
        held: list[set[int]] = [set() for _ in self._pools]
        for hit in self._hits.values():
            for kind, blocks in zip(self._kinds, hit.blocks, strict=True):
                held[kind.pool] |= set(blocks) - {NULL}
        return list(map(len, held))

    def _n_blocks(self, request: RequestBlocks) -> list[int]:
        """By pool, blocks that a request has, shared and spare ones as well."""
        out = [0] * len(self._pools)
        for g, (kind, table) in enumerate(zip(self._kinds, request.tables, strict=True)):
            if kind.has_blocks:
                n_spare = len(request.spare[g]) if request.spare else 0
                out[kind.pool] += len(table) - table.count(NULL) + n_spare
        return out

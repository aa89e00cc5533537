"""A coordinator with a pool or more, driven as an engine drives it, for the cases' tests."""

from array import array

from kvrt.paged.hashing import Chain, PrefixHash
from kvrt.paged.layout.spec import PagedGroup
from kvrt.paged.manager import BlockManager
from kvrt.paged.pool import BlockPool, HashIndex
from kvrt.paged.requests.copies import Copies
from kvrt.paged.requests.request_blocks import RequestBlocks
from kvrt.paged.rules import BlockRules


def full(b=16, **rest):
    return PagedGroup(kind="full", layers=(0,), block_size=b, **rest)


def window(size, b=16, **rest):
    return PagedGroup(kind="window", layers=(1,), block_size=b, size=size, **rest)


def chunked(size, b=16, **rest):
    return PagedGroup(kind="chunked", layers=(2,), block_size=b, size=size, **rest)


def state(b=16, **rest):
    return PagedGroup(kind="recurrent", layers=(3,), block_size=b, **rest)


def text(n, seed=0):
    """Tokens that no other seed shares."""
    return [seed * 100_000 + i for i in range(n)]


class Cache:
    """Requests that compute at once what they get room for."""

    def __init__(self, groups, n_blocks, *, order="unhashed_first", events=False, **rest):
        n_blocks = (n_blocks,) if isinstance(n_blocks, int) else n_blocks
        caching = rest.get("caching", True)
        self.pools = [BlockPool(n, caching=caching, order=order, events=events) for n in n_blocks]
        rest = {"n_in_flight": 8192, "n_ctx": 16384, **rest}
        self.paged = BlockManager(groups, self.pools, BlockRules(**rest))
        self.groups, self.chains = groups, {}

    @property
    def pool(self):
        return self.pools[0]

    def chain(self, tokens, **extra):
        chain = Chain(self.paged.block_size, **extra)
        chain.extend(tokens)
        return chain

    def start(self, name, tokens, *, read=True, chunk=None, **extra):
        """Admits a request and computes its prompt; the hit and the first blocks, or None."""
        self.chains[name] = chain = self.chain(tokens, **extra)
        hit = self.paged.find_hit(chain, read=read)
        end = min(len(tokens), hit.n_tokens + (chunk or len(tokens)))
        new = self.paged.allocate(name, end, chain=chain, hit=hit)
        if new is None:
            return None
        self.paged.register(name, end)
        while end < len(tokens):
            start, end = end, min(len(tokens), end + chunk)
            assert self.paged.allocate(name, end, n_settled=start) is not None
            self.paged.register(name, end)
        return hit, new

    def grow(self, name, n_tokens, seed=7):
        """Appends tokens up to n_tokens in all."""
        chain = self.chains[name]
        chain.extend(text(n_tokens, seed)[len(chain.tokens) :])
        new = self.paged.allocate(name, n_tokens)
        if new is not None:
            self.paged.register(name, n_tokens)
        return new

    def n_needed(self, name, n_tokens, *, hit=None, n_settled=None):
        """Blocks that `allocate` would take out of each pool's queue."""
        request = self.paged._begun(name, None, hit, None)
        return tuple(self.paged._plan(request, n_tokens, hit, n_settled).need)

    def tables(self, name):
        return [list(self.paged.table(name, g)) for g in range(len(self.groups))]

    def hit(self, tokens, **extra):
        return self.paged.find_hit(self.chain(tokens, **extra))

    def put(self, group, blocks, chain):
        """Makes block `i` of a chain findable in a group, for each i; as ids by i."""
        g = self.groups[group]
        pool = self.pools[g.pool]
        entries = chain.entries(g.block_size // self.paged.block_size)
        ids = {}
        for i in blocks:
            (ids[i],) = pool.take(1)
            pool.register(ids[i], group, entries[i])
        return ids

    def registered(self, name, group):
        """Which blocks of a request's table can be found."""
        pool = self.pools[self.groups[group].pool]
        table = self.paged.table(name, group)
        return [i for i, block in enumerate(table) if block and pool.keys(block)]

    def photo(self):
        """All that there is, to compare with later."""
        return [_plain(p) for p in self.pools] + [_plain(self.paged)]


def _plain(x):
    """The values that an object is made of, none of which changes any more."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list) and x and isinstance(x[0], int | PrefixHash):
        return tuple(x)
    if isinstance(x, set):
        return frozenset(x)
    if isinstance(x, array):
        return x.tobytes()
    if isinstance(x, PrefixHash):
        return x
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    if isinstance(x, BlockPool | BlockManager | Chain | RequestBlocks | Copies | HashIndex):
        return {k: _plain(v) for k, v in vars(x).items()}
    return x

"""Random histories of requests, against rows that say which text they were computed for.

The rows stand for a device: a token may be computed only where every group holds just the rows
that it sees, and none of them is anybody else's.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from paged_cases import Cache, chunked, full, state, window

from kvrt.errors import BadRange, CacheFull, CannotRewind, UsageError
from kvrt.paged.layout.spec import PagedGroup

pytestmark = pytest.mark.slow

N_CTX, CHUNK = 48, 12
SHARED = PagedGroup(kind="shared", layers=(9,), block_size=4, target=0)

# Groups, pools' sizes are drawn, options.
PLANS = [
    ([full(4)], {}),
    ([full(4), SHARED, window(5, b=4)], {}),
    ([full(4), window(3, b=2), window(9, b=4)], {}),
    ([full(2), window(1, b=2), chunked(6, b=2)], {}),
    ([window(4, b=2), window(7, b=1)], {}),
    ([chunked(8, b=4)], {}),
    ([full(4), state(8, pool=1)], {}),
    ([state(4), window(5, b=2), state(4), full(1, pool=1)], {"checkpoint_interval": 8}),
    ([full(2), window(3, b=2), state(4)], {"checkpoint_interval": 0}),
    ([full(4), state(4)], {"partial": True, "hash_block_size": 2}),
    ([full(4), state(8), window(3, b=2, pool=1), full(2)], {"partial": True}),
    ([state(4), state(4, pool=1)], {"partial": True, "hash_block_size": 1}),
    ([state(4), full(8)], {"partial": True, "hash_block_size": 2}),
    ([full(4), window(5, b=2)], {"drafts": [0, 1]}),
    ([full(4), state(4)], {"partial": True, "hash_block_size": 2, "drafts": [0]}),
    ([full(4), full(2, pool=1)], {"caching": False}),
    ([full(4), window(5, b=2, n_sink=3)], {}),
    ([window(4, b=4, n_sink=5), chunked(6, b=2, n_sink=1)], {"checkpoint_interval": 8}),
    ([full(4), window(6, b=4)], {"partial": True, "hash_block_size": 1}),
    ([chunked(6, b=4), window(5, b=8, n_sink=2)], {"partial": True, "hash_block_size": 2}),
    ([full(4), window(5, b=4)], {"partial": True, "hash_block_size": 2, "drafts": [1]}),
    ([state(4), window(3, b=4), full(8)], {"partial": True, "hash_block_size": 2}),
]

# A request: which text, how much of it, tokens of its own, salt, whether it reads, asks for all.
STARTS = st.tuples(
    st.sampled_from([0, 0, 1]),
    st.sampled_from([1, 4, 8, 13, 16, 24, 30]),
    st.sampled_from([0, 1, 6]),
    st.sampled_from([b"", b"", b"", b"x"]),
    st.sampled_from([True, True, True, False]),
    st.booleans(),
)


class Request:
    def __init__(self, text, salt, n_prompt):
        self.text, self.salt = text, salt
        self.n_prompt, self.n_computed = n_prompt, 0

    def row(self, n):
        """What the row of token n - 1 depends on."""
        return (self.salt, *self.text[:n])


class PagedMachine(RuleBasedStateMachine):
    """One pool or two, some requests, and what lies in each row of each block."""

    @initialize(
        plan=st.sampled_from(PLANS),
        n_blocks=st.tuples(st.integers(8, 80), st.integers(4, 60)),
        order=st.sampled_from(["unhashed_first", "by_time"]),
    )
    def begin(self, plan, n_blocks, order):
        self.groups, options = plan
        n_pools = 1 + max(g.pool for g in self.groups)
        self.c = Cache(
            self.groups, n_blocks[:n_pools], order=order, n_in_flight=CHUNK, n_ctx=N_CTX, **options
        )
        self.paged, self.partial = self.c.paged, options.get("partial", False)
        self.rows = [{} for _ in self.c.pools]  # (block, offset): (group, row)
        self.requests, self.n_started = {}, 0

    # --- a step -----------------------------------------------------------------------------------

    @rule(data=st.data(), n_steps=st.integers(1, 5))
    def steps(self, data, n_steps):
        for _ in range(n_steps):
            self.step(data, data.draw(st.lists(STARTS, max_size=2)))
            self.ledger()

    def step(self, data, starts):
        if data.draw(st.sampled_from([True, True, True, False]), label="new step"):
            self.paged.new_step()
        planned = {}
        for name, r in list(self.requests.items()):
            n = data.draw(st.sampled_from([0, 1, 1, 2, 5, CHUNK, -1, -2]), label=f"{name} n")
            if not (end := self.until(r, n)):
                continue
            if self.grow(name, r, end):
                planned[name] = end
            elif data.draw(st.booleans(), label="preempt"):
                self.drop(name)
        for begin, n_common, n_tail, salt, read, whole in starts:
            text = [begin * 100 + i for i in range(n_common)]
            text += [1000 * self.n_started + i for i in range(n_tail)]
            self.start(text, salt, read, whole, planned, data)
        for name in planned:
            self.stretch(name, planned, data)
        self.run_copies(self.paged.take_copies())
        for name, end in planned.items():
            self.compute(name, end)
        for name, end in planned.items():
            if data.draw(st.sampled_from([True, True, True, False]), label=f"register {name}"):
                self.paged.register(name, end)

    def stretch(self, name, planned, data):
        """A step that turns out to have room for more than it was planned with."""
        r, end = self.requests[name], planned[name]
        more = data.draw(st.sampled_from([0, 0, 1, 3, CHUNK]), label=f"{name} more")
        longer = min(end + more, r.n_computed + CHUNK, N_CTX)
        r.text += [7] * (longer - len(r.text))
        if longer > end and self.grow(name, r, longer):
            planned[name] = longer

    def until(self, r, n):
        """Where a step ends: after n tokens, with a block of all groups (-1), or a hit (-2)."""
        if n == -2:
            fine = self.paged.block_size
            n = (r.n_prompt - 1) // fine * fine - r.n_computed
            n = n if 0 < n <= CHUNK else 1
        if n == -1:
            n = min(CHUNK, self.paged.align - r.n_computed % self.paged.align)
        while len(r.text) < min(r.n_computed + n, N_CTX):
            r.text.append(7)
        return min(r.n_computed + n, N_CTX) if n and r.n_computed < N_CTX else 0

    def grow(self, name, r, end):
        if end <= self.paged.n_capacity(name):
            if end > r.n_computed + 1 and self.has_state:
                # A prompt's step says where it ends; single tokens need not ask.
                assert self.paged.allocate(name, end, n_settled=r.n_computed) is not None
            self.extend(name, end)
            return end
        before = self.c.photo()
        free = [p.n_free for p in self.c.pools]
        need = self.c.n_needed(name, end, n_settled=r.n_computed)
        new = self.paged.allocate(name, end, n_settled=r.n_computed)
        if new is None:
            assert self.c.photo() == before
            assert any(n > f for n, f in zip(need, free, strict=True))
            return 0
        assert self.by_pool(new) == need
        self.extend(name, end)
        return end

    @property
    def has_state(self):
        return any(g.kind == "recurrent" for g in self.groups)

    def extend(self, name, end):
        chain = self.c.chains[name]
        chain.extend(self.requests[name].text[len(chain.tokens) : end])

    def start(self, text, salt, read, whole, planned, data):
        name = self.n_started
        chain = self.c.chain(text, salt=salt)
        hit = self.paged.find_hit(chain, read=read)
        assert 0 <= hit.n_tokens < len(text)
        assert read or hit.n_tokens == 0
        r = Request(text, salt, len(text))
        r.n_computed = hit.n_tokens
        self.check_hit(r, hit)
        n = data.draw(st.sampled_from([3, CHUNK, -1, -2]), label="first n")
        end = min(self.until(r, n), len(text))
        before = self.c.photo()
        need = self.c.n_needed(name, end, hit=hit)
        whole = len(text) if whole else None
        new = self.paged.allocate(name, end, chain=chain, hit=hit, whole=whole)
        if new is None:
            assert self.c.photo() == before
            return
        idle = sum(need) - sum(self.by_pool(new))
        assert 0 <= idle <= sum(map(len, hit.blocks))
        self.requests[name], self.c.chains[name] = r, chain
        self.n_started += 1
        planned[name] = end

    def by_pool(self, blocks):
        out = [0] * len(self.c.pools)
        for g, ids in zip(self.groups, blocks, strict=True):
            out[g.pool] += len(ids)
        return tuple(out)

    def run_copies(self, copies):
        """All at once: what is read is what was there before."""
        read = []
        for g, src, dst in copies:
            p = self.groups[g].pool
            read += [((p, dst, o), row) for (b, o), row in self.rows[p].items() if b == src]
        written = [(self.groups[g].pool, dst) for g, _, dst in copies]
        assert len(set(written)) == len(written)
        for (p, dst, o), row in read:
            self.rows[p][dst, o] = row

    def compute(self, name, end):
        r = self.requests[name]
        self.check_sees(name, r, r.n_computed)
        for g, group in enumerate(self.groups):
            if group.kind == "shared":
                continue
            table, b, p = self.paged.table(name, g), group.block_size, group.pool
            spots = [(i // b, i % b, i + 1) for i in range(r.n_computed, end)]
            if group.kind == "recurrent":
                spots = [((end - 1) // b, 0, end)]
                assert not self.c.pools[p].keys(table[spots[0][0]])
            for block in {table[i] for i, _, _ in spots}:
                assert block, "a token would be written to the null block"
                assert self.holders(g, block) == 1, "somebody else reads what is written"
            for i, offset, n in spots:
                self.rows[p][table[i], offset] = (g, r.row(n))
        r.n_computed = end

    def holders(self, g, block):
        return sum(list(self.paged.table(name, g)).count(block) for name in self.requests)

    # --- what a token sees ------------------------------------------------------------------------

    def sees(self, g, r, n):
        """Positions whose rows a token at n sees, and their places in a table."""
        group = self.groups[g]
        b = group.block_size
        if group.kind == "recurrent":
            return [((n - 1) // b, 0, n)] if n else []
        first = {"window": n - group.size + 1, "chunked": n - n % (group.size or 1)}
        start = max(0, first.get(group.kind, 0))
        seen = [i for i in range(n) if i >= start or i < group.n_sink]
        return [(i // b, i % b, i + 1) for i in seen]

    def check_sees(self, name, r, n):
        for g, group in enumerate(self.groups):
            g = group.target if group.target is not None else g
            self.check_rows(g, self.paged.table(name, g), r, self.sees(g, r, n))

    def check_rows(self, g, table, r, places):
        rows = self.rows[self.groups[g].pool]
        for i, offset, n in places:
            assert table[i], f"group {g} lacks token {n - 1}"
            assert rows[table[i], offset] == (g, r.row(n))

    def check_hit(self, r, hit):
        queued = {(self.groups[c.group].pool, c.dst) for _, c in self.paged._copies._queued}
        for g, table in enumerate(hit.blocks):
            p, b = self.groups[g].pool, self.groups[g].block_size
            if self.groups[g].kind == "shared" or any((p, x) in queued for x in table):
                continue  # its rows are yet to be copied
            assert len(table) == -(-hit.n_tokens // b)
            assert self.partial or hit.n_tokens % b == 0
            self.check_rows(g, table, r, self.sees(g, r, hit.n_tokens))
            there = [(i // b, i % b, i + 1) for i in range(hit.n_tokens) if table[i // b]]
            if self.groups[g].kind != "recurrent":
                self.check_rows(g, table, r, there)

    # --- other calls ------------------------------------------------------------------------------

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.drop(name)

    def drop(self, name):
        self.paged.free(name)
        del self.requests[name], self.c.chains[name]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), back=st.sampled_from([0, 0, 0, 1, 4]))
    def fork(self, data, back):
        src = data.draw(st.sampled_from(sorted(self.requests)))
        old = self.requests[src]
        n = old.n_computed - back
        if n < 1 or (self.has_state and back):
            return  # where the state of fewer tokens is, the caller has to know
        r = Request(old.text[:n], old.salt, old.n_prompt)
        r.n_computed = n
        before, name = self.c.photo(), self.n_started
        chain = self.c.chain(r.text, salt=r.salt)
        try:
            copies = self.paged.fork(src, name, n, chain=chain)
        except (CacheFull, CannotRewind) as error:
            assert self.c.photo() == before
            assert back or isinstance(error, CacheFull)
            return
        self.run_copies(copies)
        self.n_started += 1
        self.requests[name], self.c.chains[name] = r, chain
        self.check_sees(name, r, n)

    @rule(data=st.data())
    def odd(self, data):
        """Rare calls, and those that are refused."""
        getattr(self, data.draw(st.sampled_from(["forget", "refused"])))(data)

    def forget(self, data):
        """Rows that turned out to be missing are found by nobody else."""
        name = data.draw(st.sampled_from([*sorted(self.requests), None]))
        if name is None:
            return
        g = data.draw(st.integers(0, len(self.groups) - 1))
        pool = self.c.pools[self.groups[g].pool]
        blocks = [b for b in self.paged.table(name, g) if b]
        pool.forget(blocks)
        assert not any(pool.keys(b) for b in blocks)

    def refused(self, data):
        before, n = self.c.photo(), data.draw(st.sampled_from([0, -1, N_CTX + 1]))
        for call, error in (
            (lambda: self.paged.allocate("new", n), BadRange),
            (lambda: self.paged.free("unknown"), UsageError),
            (lambda: self.paged.register("unknown", 1), UsageError),
            (lambda: self.paged.fork("unknown", "new", 1), UsageError),
            (lambda: self.paged.allocate("new", 4, n_settled=1), BadRange),
        ):
            with pytest.raises(error):
                call()
        assert self.c.photo() == before

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def ledger(self):
        if not hasattr(self, "c"):
            return
        for p, pool in enumerate(self.c.pools):
            refs, owners = [0] * pool.n_blocks, {}
            for name in self.requests:
                for g, group in enumerate(self.groups):
                    for block in self.paged.table(name, g) if group.pool == p else ():
                        if group.kind != "shared" and block:
                            refs[block] += 1
                            assert owners.setdefault(block, g) == g
            for block in self.paged._copies.held(p):
                refs[block] += 1
            queue = pool.queue()
            assert refs == [pool.n_refs(b) for b in range(pool.n_blocks)]
            assert sorted(queue) == [b for b in range(1, pool.n_blocks) if not refs[b]]
            cached = [b for b in queue if pool.keys(b)]
            n_held = sum(map(bool, refs))
            assert len(queue) == pool.n_free
            assert len(cached) == pool.n_cached
            assert (len(queue) - len(cached)) + n_held + len(cached) == pool.n_blocks - 1

    @invariant()
    def peaks(self):
        for name, r in getattr(self, "requests", {}).items():
            held = [
                sum(map(bool, self.paged.table(name, g))) if group.kind != "shared" else 0
                for g, group in enumerate(self.groups)
            ]
            by_pool = self.by_pool([[0] * n for n in held])
            n_peak = self.paged.n_peak(max(r.n_computed, self.paged._requests[name].n_tokens))
            assert all(h <= n for h, n in zip(by_pool, n_peak, strict=True))

    def teardown(self):
        for name in getattr(self, "requests", ()):
            self.paged.free(name)
        if hasattr(self, "c"):
            self.paged.take_copies()
            self.paged.new_step()
            assert all(p.n_free == p.n_blocks - 1 for p in self.c.pools)


def run(n, **rest):
    run_state_machine_as_test(
        PagedMachine, settings=settings(max_examples=n, stateful_step_count=15, **rest)
    )


def test_a_few_histories():
    run(5, derandomize=True)


def test_many_histories(budget):
    run(budget(25, 60))

"""Tokens that a policy drops from blocks: what later ones see keeps its cells, no block is lost."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from paged_cases import Cache, chunked, full, text, window

from kvrt.errors import UsageError
from kvrt.paged.hits import Wanted
from kvrt.paged.layout.spec import NULL
from kvrt.paged.tables import BlockTables

N_MOST, CHUNK = 40, 7  # tokens that a request has at once, and those of a step
GROUPS = {
    "full": full,
    "window": lambda b: window(5, b=b),
    "wide": lambda b: window(23, b=b),
    "sinks": lambda b: window(6, b=b, n_sink=3),
    "chunked": lambda b: chunked(6, b=b),
    "sinks of chunks": lambda b: chunked(9, b=b, n_sink=2),
}


@dataclasses.dataclass(frozen=True)
class Moving:
    """What a request keeps, see `kvrt.paged.kinds.Moving`."""

    n_most: int
    n_keep: int
    n_left: int = 0


class Request:
    """A request that drops tokens, beside its tokens as a list."""

    def __init__(self, device, name, prompt, moving):
        self.device, self.name, self.moving = device, name, moving
        self.tokens, self.cache = [], device.cache
        self.prompt, n_found = prompt, min(len(prompt), moving.n_keep)
        self.chain = self.cache.chain(prompt[:n_found])

    def admit(self):
        """Takes all that it will need; whether there was room."""
        wanted = Wanted(n_tokens=len(self.prompt), moving=self.moving)
        hit = self.cache.paged.find_hit(self.chain, wanted)
        n = min(len(self.prompt), hit.n_tokens + CHUNK)
        room = dict(chain=self.chain, hit=hit, whole=self.moving)
        if self.cache.paged.allocate(self.name, n, **room) is None:
            return False
        self.device.run_copies(self.cache.paged.take_copies())
        self.follow()
        self.tokens = self.prompt[: hit.n_tokens]
        self.write(n)
        return True

    def follow(self):
        for g, table in enumerate(self.device.tables):
            paged = self.cache.paged
            table.put(self.name, paged.table(self.name, g), paged.n_head(self.name, g))

    def write(self, end):
        """Computes the prompt's next tokens, or some of its own, up to `end` in all."""
        start = len(self.tokens)
        assert end <= self.cache.paged.n_capacity(self.name)
        for g in range(len(self.device.groups)):
            self.device.check_seen(self, g, start)
        self.tokens += self.prompt[start:end] if self.is_first else text(end - start, seed=99)
        for g, group in enumerate(self.device.groups):
            slots = self.slots(g, np.arange(start, end, dtype=np.int32))
            assert all(slot >= group.block_size for slot in slots), "written to the null block"
            cells = self.device.cells(g, slots)
            self.device.rows.update(
                {x: (g, t) for x, t in zip(cells, self.tokens[start:end], strict=True)}
            )
        n = len(self.chain.tokens)
        if self.is_first and end >= n:
            self.cache.paged.register(self.name, n)
        self.is_first = self.is_first and end < len(self.prompt)

    is_first = True

    def grow(self, n):
        """A step: it is never refused."""
        n_now = len(self.tokens)
        most = len(self.prompt) if self.is_first else self.moving.n_most
        end = min(n_now + n, most)
        if end > n_now:
            new = self.cache.paged.allocate(self.name, end, n_settled=n_now)
            assert new is not None
            self.follow()
            self.write(end)

    def drop(self, n):
        n = min(n, len(self.tokens) - self.moving.n_keep)
        n = min(n, len(self.tokens) - self.moving.n_left)
        if self.is_first or n < 1:
            return
        self.cache.paged.drop(self.name, n)
        p0 = self.moving.n_keep
        del self.tokens[p0 : p0 + n]
        for g, table in enumerate(self.device.tables):
            paged = self.cache.paged
            assert 0 <= paged.gap(self.name, g) < 2 * self.device.groups[g].block_size
            table.drop(self.name, paged.table(self.name, g), p0, paged.gap(self.name, g))

    def slots(self, g, pos):
        return self.device.tables[g].slots(np.full(len(pos), self.name, np.int32), pos)

    def end(self):
        self.cache.paged.free(self.name)
        for table in self.device.tables:
            table.clear(self.name)


class PlainDevice:
    """What lies in each cell of each pool."""

    def __init__(self, groups, n_blocks, **options):
        self.groups, self.cache = groups, Cache(groups, n_blocks, n_in_flight=CHUNK, **options)
        self.rows = {}
        self.tables = [BlockTables(group, 4, 64) for group in groups]

    def run_copies(self, copies):
        for g, src, dst in copies:
            for i in range(self.groups[g].block_size):
                if (src, i) in self.rows:
                    self.rows[dst, i] = self.rows[src, i]
        self.cache.paged.new_step()

    def cells(self, g, slots):
        """Slots as blocks and places there, for groups of a pool may differ in block size."""
        return [divmod(int(x), self.groups[g].block_size) for x in slots]

    def seen(self, g, n):
        """Positions that the token at n sees."""
        group = self.groups[g]
        first = {"window": n - group.size + 1, "chunked": n - n % (group.size or 1)}
        start = first.get(group.kind, 0)
        return [p for p in range(n) if p >= start or p < group.n_sink]

    def check_seen(self, request, g, n):
        """The token at n reads what it should, in the blocks that are listed for it."""
        pos = np.array(self.seen(g, n), np.int32)
        slots, b = request.slots(g, pos), self.groups[g].block_size
        assert [self.rows.get(x) for x in self.cells(g, slots)] == [
            (g, request.tokens[p]) for p in pos
        ]
        table, seqs = self.tables[g], np.array([request.name], np.int32)
        listed = table.block_list(request.name, n)
        tables, n_blocks = table.read(seqs, np.array([n], np.int32), 2)
        assert listed.tolist() == tables[0, : n_blocks[0]].tolist()
        assert {int(x) // b for x in slots} <= set(listed.tolist())
        assert NULL not in listed and len(set(listed.tolist())) == len(listed)
        everything = np.arange(n, dtype=np.int32)
        assert set(pos.tolist()) <= set(table.held(request.name, everything).tolist())


MOVINGS = st.builds(
    lambda n_keep, left: Moving(n_most=N_MOST, n_keep=n_keep, n_left=n_keep + left),
    st.integers(3, 17),
    st.integers(0, 20),
)
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, CHUNK), st.integers(0, 30)))


@pytest.mark.slow
@given(
    moving=MOVINGS,
    kinds=st.lists(
        st.tuples(st.sampled_from(sorted(GROUPS)), st.sampled_from([1, 2, 4, 8])),
        min_size=1,
        max_size=3,
    ),
    prompts=st.lists(st.integers(1, N_MOST), min_size=3, max_size=3),
    steps=STEPS,
    fine=st.booleans(),
)
def test_what_later_tokens_see_stays_in_its_cells(moving, kinds, prompts, steps, fine):
    """Requests that begin alike, against lists from which dropped tokens are deleted."""
    groups = [GROUPS[kind](b) for kind, b in kinds]
    options = {"partial": True, "hash_block_size": 1} if fine else {}
    device = PlainDevice(groups, 400, **options)
    requests = [Request(device, i, text(n), moving) for i, n in enumerate(prompts)]
    for i, n, n_drop in steps:
        request = requests[i]
        if not request.tokens:
            assert request.admit()
            continue
        request.grow(n)
        request.drop(n_drop)
        request.grow(n)
    for request in requests:
        if request.tokens:
            request.end()
    device.cache.paged.new_step()
    assert device.cache.pool.n_free == 399


@pytest.mark.slow
@given(
    moving=MOVINGS,
    kind=st.tuples(st.sampled_from(sorted(GROUPS)), st.sampled_from([1, 2, 4, 8])),
    n_prompt=st.integers(1, N_MOST),
    steps=STEPS,
    fine=st.booleans(),
)
def test_what_was_foretold_is_enough(moving, kind, n_prompt, steps, fine):
    """A request that is admitted where there is just as much as it reserves never lacks a block."""
    groups = [GROUPS[kind[0]](kind[1])]
    options = {"partial": True, "hash_block_size": 1} if fine else {}
    (n_blocks,) = Cache(groups, 2, n_in_flight=CHUNK, **options).paged.n_reserved(moving)
    device = PlainDevice(groups, 1 + n_blocks, **options)
    # The second one hits what the first one left.
    for _ in range(2):
        request = Request(device, 1, text(n_prompt), moving)
        assert request.admit()
        for _, n, n_drop in steps:
            request.grow(n)
            request.drop(n_drop)
        request.end()
        device.cache.paged.new_step()
    less = PlainDevice(groups, n_blocks)
    if fine and kind[1] > 1:  # without a hit nothing is copied
        return
    before = less.cache.photo()
    assert not Request(less, 1, text(n_prompt), moving).admit()
    assert less.cache.photo() == before


def test_a_window_that_no_drop_reaches_back_pins_nothing():
    """After a drop 30 tokens are left: 8 are seen, none of which is among the first 16."""
    moving = Moving(n_most=40, n_keep=16, n_left=30)
    device = PlainDevice([window(8, b=4)], 64)
    request = Request(device, 1, text(36), moving)
    request.admit()
    while request.is_first:
        request.grow(CHUNK)
    table = device.cache.paged.table(1, 0)
    assert table[0] == NULL and device.cache.paged.n_head(1, 0) == 0
    near = Moving(n_most=40, n_keep=16, n_left=20)
    pinned = Request(device, 2, text(36, 1), near)
    pinned.admit()
    while pinned.is_first:
        pinned.grow(CHUNK)
    assert NULL not in device.cache.paged.table(2, 0)[:4]
    assert device.cache.paged.n_head(2, 0) == 4


def test_who_drops_says_so_before():
    cache = Cache([full(4), window(8, b=4)], 64)
    cache.start("a", text(20))
    with pytest.raises(UsageError, match="admit it with what it keeps"):
        cache.paged.drop("a", 5)

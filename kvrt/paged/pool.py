"""Blocks by number: reference counts, the free queue, and prefix hashes of cached blocks.

A block without references keeps its contents until it is taken again, and can be found until then.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvrt.errors import BadConfig, CacheFull, UsageError
from kvrt.paged.hashing import PrefixHash, ids_in
from kvrt.paged.layout.spec import NULL

FreeOrder = Literal["unhashed_first", "by_time"]


class BlockStored(NamedTuple):
    """Blocks of a group that follow each other can be found from now on.

    Attributes:
      group: of the blocks.
      hashes: digest of each.
      parent: digest of the block before them.
      data: tokens of each, as `PrefixHash.data`.
    """

    group: int
    hashes: list[bytes]
    parent: bytes
    data: list[bytes]

    @property
    def tokens(self) -> list[int]:
        """Tokens of all of them."""
        return [t for data in self.data for t in ids_in(data)]


class BlockRemoved(NamedTuple):
    """A block cannot be found by this hash any longer; a copy of it may still be."""

    group: int
    hash: bytes


Event = BlockStored | BlockRemoved


class HashIndex:
    """Blocks by prefix hash; several may have the same, and all of them are kept."""

    def __init__(self) -> None:
        """Starts empty."""
        self._blocks: dict[tuple[int, bytes], dict[int, PrefixHash]] = {}

    def add(self, group: int, entry: PrefixHash, block_id: int) -> None:
        """Notes the prefix hash of a block."""
        key = group, entry.digest
        held = self._blocks.get(key)
        if held is None:
            self._blocks[key] = {block_id: entry}
        else:
            held[block_id] = entry

    def find(self, group: int, entry: PrefixHash) -> int | None:
        """The oldest block with just these tokens after the same parent, or None."""
        found = self._blocks.get((group, entry.digest))
        if found is not None:
            for block_id, held in found.items():
                if held == entry:
                    return block_id
        return None

    def has(self, group: int, digest: bytes) -> bool:
        """Whether a block has a digest."""
        return (group, digest) in self._blocks

    def pop(self, group: int, digest: bytes, block_id: int) -> PrefixHash | None:
        """Forgets one block of a digest; None if it was not there, and nothing changes."""
        found = self._blocks.get((group, digest), {})
        entry = found.pop(block_id, None)
        if entry is not None and not found:
            del self._blocks[group, digest]
        return entry


class BlockPool:
    """Blocks 0 to n_blocks - 1 of one storage shape; block 0 is the null block, never taken.

    Every method is O(1) a block. One that raises has changed nothing.

    Attributes:
      n_blocks: blocks, the null block included.
      n_free: blocks without references.
      n_evicted: keys that were removed so far.
      caching: whether blocks can be found again.
    """

    def __init__(
        self,
        n_blocks: int,
        *,
        caching: bool = True,
        order: FreeOrder = "unhashed_first",
        events: bool = False,
        span: int = 1,
    ):
        """All blocks are free, the lowest is taken first.

        Args:
          n_blocks: at least 1.
          caching: False keeps no key, and every freed block is taken last.
          order: which free blocks are taken next. "unhashed_first" takes those without a prefix
            hash before all others, the rest by the time they were freed; "by_time", vLLM's older
            order, takes all by that time.
          events: whether `take_events` reports anything; who turns it on has to call it.
          span: blocks that are read together, those from 1 on, so that a sequence is to have few
            of such spans.

        Raises:
          BadConfig: there is no room for the null block.
        """
        if n_blocks < 1:
            raise BadConfig(f"a pool of {n_blocks} blocks; it needs at least the null block")
        self.n_blocks = n_blocks
        self.n_free = n_blocks - 1
        self.n_evicted = 0
        self.caching = caching
        self._unhashed_first = caching and order == "unhashed_first"
        self._span = span
        # By span the blocks without references and keys; counted where it matters.
        n_spans = -(-(n_blocks - 1) // span)
        self._n_empty = [min(span, n_blocks - 1 - i * span) for i in range(n_spans)]
        self._refs = [0] * n_blocks
        # Free blocks are a ring through the null block: after it comes the next one to take.
        self._next = [*range(1, n_blocks), NULL]
        self._prev = [n_blocks - 1, *range(n_blocks - 1)]
        self._keys: dict[int, list[tuple[int, PrefixHash]]] = {}
        self._index = HashIndex()
        self._events: list[Event] | None = [] if events else None

    @property
    def usage(self) -> float:
        """Blocks in use, as a part of all usable ones."""
        usable = self.n_blocks - 1
        return 1 - self.n_free / usable if usable else 0.0

    @property
    def n_cached(self) -> int:
        """Free blocks with a prefix hash; counted, not remembered."""
        return sum(1 for block in self._keys if not self._refs[block])

    def take(self, n: int, after: int = NULL) -> list[int]:
        """Takes the next n free blocks, with one reference each, and drops their prefix hashes.

        Of blocks in spans those behind `after`, the last one of a sequence, are taken first, then
        those of spans with most empty ones. Where none is empty, all free blocks of the span of the
        next one lose their hashes at once.

        Raises:
          CacheFull: fewer are free.
        """
        if not 0 <= n <= self.n_free:
            raise CacheFull(
                f"{n} blocks wanted, {self.n_free} of {self.n_blocks - 1} are free; free a "
                "request or make the pool larger"
            )
        if self._span > 1:
            return self._take_near(n, after)
        following, refs, keys = self._next, self._refs, self._keys
        block, out = following[NULL], []
        for _ in range(n):
            out.append(block)
            refs[block] = 1
            if block in keys:
                self._evict(block)
            block = following[block]
        following[NULL] = block
        self._prev[block] = NULL
        self.n_free -= n
        return out

    def touch(self, ids: Sequence[int]) -> None:
        """Adds a reference to blocks; a free one leaves the queue. Null blocks are skipped."""
        self._check(ids)
        following, previous, refs = self._next, self._prev, self._refs
        for block in ids:
            if block == NULL:
                continue
            if not refs[block]:
                before, after = previous[block], following[block]
                following[before], previous[after] = after, before
                self.n_free -= 1
                if self._span > 1 and block not in self._keys:
                    self._n_empty[(block - 1) // self._span] -= 1
            refs[block] += 1

    def free(self, ids: Sequence[int]) -> None:
        """Drops a reference to blocks. Null blocks are skipped.

        Args:
          ids: in the order in which they should be taken again.

        Raises:
          UsageError: one has fewer references.
        """
        self._check(ids)
        refs, idle = self._refs, []
        for i, block in enumerate(ids):
            if block == NULL:
                continue
            refs[block] -= 1
            if not refs[block]:
                idle.append(block)
            elif refs[block] < 0:
                for done in ids[: i + 1]:
                    refs[done] += done != NULL
                raise UsageError(f"block {block} is freed more often than it is held; free it once")
        if self._unhashed_first:
            keys = self._keys
            if fresh := [b for b in idle if b not in keys]:
                self._link(fresh, self._next[NULL])
                idle = [b for b in idle if b in keys]
                self._count_empty(fresh)
        elif self._span > 1:
            self._count_empty([b for b in idle if b not in self._keys])
        if idle:
            self._link(idle, NULL)

    def register(self, block_id: int, group: int, entry: PrefixHash) -> None:
        """Lets a block in use be found by a prefix hash, beside those it has already.

        Blocks of equal contents are not merged: tables only grow at their ends.

        Raises:
          UsageError: it has no reference.
        """
        if not (0 <= block_id < self.n_blocks and self._refs[block_id]):
            self._check((block_id,))
            raise UsageError(f"block {block_id} is held by nobody; register it before it is freed")
        key = (group, entry)
        if not self.caching:
            return
        keys = self._keys.get(block_id)
        if keys is None:
            self._keys[block_id] = [key]
        elif key in keys:
            return
        else:
            keys.append(key)
        self._index.add(group, entry, block_id)
        if self._events is not None:
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockStored) and (last.group, last.hashes[-1]) == (
                group,
                entry.parent,
            ):
                last.hashes.append(entry.digest)
                last.data.append(entry.data)
            else:
                stored = BlockStored(group, [entry.digest], entry.parent, [entry.data])
                self._events.append(stored)

    def find(self, group: int, entry: PrefixHash) -> int | None:
        """A block with this prefix hash, or None."""
        return self._index.find(group, entry)

    def may_have(self, group: int, digest: bytes) -> bool:
        """Whether a block has a prefix hash of this digest."""
        return self._index.has(group, digest)

    def forget(self, ids: Sequence[int]) -> None:
        """Removes all keys of blocks, in use or free, whose contents turned out to be damaged."""
        self._check(ids)
        for block in ids:
            if block in self._keys:
                self._evict(block)
                if not self._refs[block]:
                    self._count_empty([block])

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        out, self._events = self._events or [], None if self._events is None else []
        return out

    def n_refs(self, block_id: int) -> int:
        """References of a block; 0 also for the null block. What tests count against tables."""
        self._check((block_id,))
        return self._refs[block_id]

    def count(self, ids: Sequence[int], n_refs: int) -> int:
        """How many of these have just so many references; null blocks do not count."""
        refs = self._refs
        return sum(refs[block] == n_refs for block in ids if block != NULL)

    def keys(self, block_id: int) -> tuple[tuple[int, PrefixHash], ...]:
        """Group and prefix hash of all that a block can be found by."""
        self._check((block_id,))
        return tuple(self._keys.get(block_id, ()))

    def queue(self) -> list[int]:
        """All free blocks, the next to be taken first: the order that tests compare."""
        out, block = [], self._next[NULL]
        while block != NULL:
            out.append(block)
            block = self._next[block]
        return out

    def _check(self, ids: Sequence[int]) -> None:
        # An index below 0 counts from the end in Python: a wrong id would be another block.
        if ids and (min(ids) < 0 or max(ids) >= self.n_blocks):
            raise UsageError(
                f"blocks {min(ids)} to {max(ids)} of a pool with {self.n_blocks}; ids are 0 to "
                f"{self.n_blocks - 1}"
            )

    def _evict(self, block: int) -> None:
        for group, entry in self._keys.pop(block):
            self._index.pop(group, entry.digest, block)
            self.n_evicted += 1
            if self._events is not None:
                self._events.append(BlockRemoved(group, entry.digest))

    def _take_near(self, n: int, after: int) -> list[int]:
        """See `take`."""
        following, previous, refs, keys = self._next, self._prev, self._refs, self._keys
        out: list[int] = []
        block = after + 1
        while len(out) < n:
            inside = after != NULL and block < self.n_blocks
            if not inside or (block - 1) // self._span != (after - 1) // self._span:
                block = self._new_span()
            elif refs[block] or block in keys:
                block += 1
                continue
            before, beyond = previous[block], following[block]
            following[before], previous[beyond] = beyond, before
            refs[block] = 1
            self._n_empty[(block - 1) // self._span] -= 1
            self.n_free -= 1
            out.append(block)
            after, block = block, block + 1
        return out

    def _new_span(self) -> int:
        """An empty block of a span with most of them: the first, or one in their middle."""
        i = max(range(len(self._n_empty)), key=self._n_empty.__getitem__)
        if not self._n_empty[i]:
            i = (self._next[NULL] - 1) // self._span
        first = 1 + i * self._span
        blocks = range(first, min(first + self._span, self.n_blocks))
        if not self._n_empty[i]:
            idle = [b for b in blocks if not self._refs[b]]
            self.forget(idle)
        empty = [b for b in blocks if not self._refs[b] and b not in self._keys]
        # Where others live, in the middle, so that they are long in finding each other's blocks.
        return empty[0 if len(empty) == len(blocks) else len(empty) // 2]

    def _count_empty(self, blocks: Sequence[int]) -> None:
        if self._span > 1:
            for block in blocks:
                self._n_empty[(block - 1) // self._span] += 1

    def _link(self, blocks: list[int], end: int) -> None:
        """Puts blocks into the queue, before another one or, with the null block, last."""
        following, previous = self._next, self._prev
        last = previous[end]
        for block in blocks:
            following[last] = block
            previous[block] = last
            last = block
        following[last] = end
        previous[end] = last
        self.n_free += len(blocks)

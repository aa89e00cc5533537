"""Which blocks a tier has, which are coming, and which are evicted to make room.

A block is stored in two steps, so that its bytes can take their time: `reserve` gives it a place,
`complete_store` says that they are there. It is loaded in two steps as well, and stays where it is
between them. All of it happens on one thread; only bytes are moved by others.

Source: vLLM's KV offloading manager.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvrt.errors import BadConfig
from kvrt.paged.tiers.arc import Arc
from kvrt.paged.tiers.lru import Lru
from kvrt.paged.tiers.policy import EvictionPolicy, Key, TierBlock

PolicyName = Literal["lru", "arc"]


class Reserved(NamedTuple):
    """Keys that a tier will store, the place of each, and the keys that were evicted for them."""

    keys: tuple[Key, ...]
    ids: tuple[int, ...]
    evicted: tuple[Key, ...]


class TierIndex:
    """Keys of one tier; a call that refuses has changed nothing.

    Args:
      n_blocks: blocks that the tier has.
      policy: which idle block is evicted first.

    Attributes:
      n_idle: blocks that may be evicted.
    """

    def __init__(self, n_blocks: int, *, policy: PolicyName = "lru") -> None:
        """Starts empty.

        Raises:
          BadConfig: there is room for no block.
        """
        if n_blocks < 1:
            raise BadConfig(f"a tier of {n_blocks} blocks; it needs at least 1")
        self.n_blocks = n_blocks
        self.n_idle = 0
        self._policy: EvictionPolicy = Lru() if policy == "lru" else Arc(n_blocks)
        self._free: list[int] = []  # freed; the last one is taken first
        self._n_fresh = 0  # ids below it were in use

    @property
    def n_used(self) -> int:
        """Blocks that are there or coming."""
        return len(self._policy)

    @property
    def n_free(self) -> int:
        """Blocks that can be filled without an eviction."""
        return self.n_blocks - self.n_used

    def lookup(self, key: Key) -> bool | None:
        """Whether a key can be loaded; None while it is coming."""
        block = self._policy.get(key)
        return False if block is None else (True if block.is_ready else None)

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that keys were used, here or elsewhere."""
        self._policy.touch(keys)

    def prepare_load(self, keys: Sequence[Key]) -> tuple[int, ...]:
        """Where keys are; they stay there until `complete_load`. All of them must be ready."""
        found = [self._ready(key) for key in keys]
        for block in found:
            self.n_idle -= block.is_idle
            block.n_readers += 1
        return tuple(block.id for block in found)

    def complete_load(self, keys: Iterable[Key]) -> None:
        """One load of each key is over."""
        for key in keys:
            block = self._ready(key)
            assert block.n_readers > 0, "a load that was not prepared"
            block.n_readers -= 1
            self.n_idle += block.is_idle

    def wanted(self, keys: Iterable[Key]) -> list[Key]:
        """Those of the keys that are not here, each once."""
        return [key for key in dict.fromkeys(keys) if self._policy.get(key) is None]

    def reserve(self, keys: Sequence[Key], keep: Collection[Key]) -> Reserved | None:
        """Reserves places for keys that are not here; none of `keep` is evicted for them.

        None: there is no room for all of them, and nothing was evicted.
        """
        n = len(keys) - self.n_free
        victims = []
        if n > 0:
            if n > self.n_idle:
                return None
            victims = self._policy.evict(n, keep)
            if victims is None:
                return None
        self._free += [block.id for _, block in victims]
        self.n_idle -= len(victims)
        ids = tuple(self._take_id() for _ in keys)
        for key, block_id in zip(keys, ids, strict=True):
            self._policy.insert(key, TierBlock(block_id))
        return Reserved(tuple(keys), ids, evicted=tuple(key for key, _ in victims))

    def complete_store(self, keys: Iterable[Key], success: bool = True) -> None:
        """The bytes of keys are there or, without success, never will be: then places are freed."""
        for key in keys:
            block = self._policy.get(key)
            if block is None or block.is_ready:
                continue
            if success:
                block.n_readers = 0
                self.n_idle += 1
            else:
                self._policy.remove(key)
                self._free.append(block.id)

    def adopt(self, found: Mapping[Key, int]) -> None:
        """Takes over keys that lie at these ids already; only while the tier is empty."""
        assert not self.n_used and not self._n_fresh, "the tier has blocks"
        for key, block_id in found.items():
            block = TierBlock(block_id)
            block.n_readers = 0
            self._policy.insert(key, block)
        taken = set(found.values())
        assert len(taken) == len(found) and taken <= set(range(self.n_blocks))
        self._free = [i for i in range(self.n_blocks - 1, -1, -1) if i not in taken]
        self._n_fresh, self.n_idle = self.n_blocks, len(found)

    def drop(self, keys: Iterable[Key]) -> None:
        """Drops keys whose bytes are damaged; those that are read or coming stay."""
        for key in keys:
            block = self._policy.get(key)
            if block is not None and block.is_idle:
                self._policy.remove(key)
                self._free.append(block.id)
                self.n_idle -= 1

    def _ready(self, key: Key) -> TierBlock:
        block = self._policy.get(key)
        assert block is not None and block.is_ready, "only keys that lookup found can be loaded"
        return block

    def _take_id(self) -> int:
        if self._n_fresh < self.n_blocks:
            self._n_fresh += 1
            return self._n_fresh - 1
        return self._free.pop()

"""Blocks of an engine beyond the device, offloaded to the host's memory and to a disk.

Full blocks are copied to the host as soon as they can be found, so a block that is evicted on the
device, or a sequence that is preempted, costs nothing more. A prefix that a tier holds is put into
free blocks of the device first, where it is found as if it had never left.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from kvrt.cache import capture
from kvrt.errors import BadConfig
from kvrt.options.serving import TierConfig
from kvrt.paged.hashing import Chain, PrefixHash
from kvrt.paged.hits import Hit, Wanted
from kvrt.paged.layout.spec import NULL, PagedPlan
from kvrt.paged.manager import BlockManager
from kvrt.paged.pool import BlockPool
from kvrt.paged.requests.transaction import Registered
from kvrt.paged.tiers.block_file import BlockFile
from kvrt.paged.tiers.disk import DiskTier, block_name
from kvrt.paged.tiers.host import HostTier
from kvrt.paged.tiers.index import TierIndex
from kvrt.paged.tiers.tiering import Tiering
from kvrt.program.device import Device
from kvrt.serving.metrics import TierUse
from kvrt.session import fingerprint

# What a block of a group holds: its name in the tiers.
_Entry = tuple[int, PrefixHash]
# Loads of which the time is taken; after them the device is not waited for.
_N_TIMED = 4
# Bytes of a block's name on a disk beside its tokens: digests, and a salt that is not too long.
_NAME_REST = 256
# Of an identity, what blocks of before lacked and that follows from the files of the weights.
_OF_MODEL_FILES = {"name", "arch", "tokenizer", "decoder", "weight_type"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolStores:
    """The pools of an engine on the device.

    Attributes:
      plan: groups and pools.
      pools: their blocks.
      stores: by pool, the device's store; None for states.
    """

    plan: PagedPlan
    pools: Sequence[BlockPool]
    stores: Sequence[int | None]


class Tiers:
    """Tiers under all pools of an engine."""

    def __init__(
        self,
        config: TierConfig,
        on_device: PoolStores,
        manager: BlockManager,
        device: Device,
        fingerprints: Sequence[bytes],
    ):
        """Starts threads, which `close` ends.

        Args:
          config: how much room.
          on_device: the pools that are offloaded.
          manager: whose hits are made longer.
          device: has the bytes.
          fingerprints: of what blocks on a disk belong to, and those of before.

        Raises:
          BadConfig: there is not room for one block of each pool, or a file is another's.
        """
        self._config, self._plan, self._stores = config, on_device.plan, on_device.stores
        self._pools, self._manager, self._device = on_device.pools, manager, device
        self._tiers = [self._open(i, fingerprints) for i in range(len(self._pools))]
        # Seconds a token that is computed and a byte that is loaded; 0 is not known yet.
        self._token_s = self._byte_s = 0.0
        self._n_timed = 0

    def begin(self) -> None:
        """A step begins."""
        for tier in self._tiers:
            tier.new_step()

    def store(self, found: Sequence[Registered]) -> None:
        """Copies blocks that can be found from now on, in the background."""
        for pool, tier in enumerate(self._tiers):
            mine = [x for x in found if self._plan.groups[x.group].pool == pool]
            if mine:
                tier.store([(x.group, x.entry) for x in mine], [x.block for x in mine])

    def promote(self, chain: Chain, hit: Hit, wanted: Wanted | None = None) -> bool | None:
        """Puts what the tiers have of a prompt beyond a hit into free blocks of the device.

        Returns:
          Whether more can be found now; None if it is coming, so that it is worth asking again.
        """
        views = [_Both(p, t) for p, t in zip(self._pools, self._tiers, strict=True)]
        beyond = self._manager.find_beyond(chain, views, wanted)
        if beyond.n_tokens <= hit.n_tokens:
            return False
        lacking: list[dict[_Entry, None]] = [{} for _ in self._pools]
        held: list[list[int]] = [[] for _ in self._pools]
        for group, blocks in zip(self._plan.groups, beyond.blocks, strict=True):
            view = views[group.pool]
            lacking[group.pool] |= {view.keys[x]: None for x in blocks if x < NULL}
            held[group.pool] += [x for x in blocks if x > NULL]
        n_bytes = sum(
            len(keys) * spec.block_bytes
            for keys, spec in zip(lacking, self._plan.pools, strict=True)
        )
        if not self._is_worth(beyond.n_tokens - hit.n_tokens, n_bytes):
            return False
        coming = False
        for keys, tier in zip(lacking, self._tiers, strict=True):
            ready = tier.find(list(keys))
            if ready.n_ready + ready.n_coming < len(keys):
                return False
            coming |= ready.n_coming > 0
        if coming:
            return None
        return self._load(lacking, held, n_bytes)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts: what a load has to beat."""
        each = seconds / n_tokens
        self._token_s = each if not self._token_s else 0.8 * self._token_s + 0.2 * each

    def wait(self) -> None:
        """Waits a moment for what is on its way."""
        for tier in self._tiers:
            if tier.is_busy:
                tier.wait(0.01)
                return

    def flush(self) -> None:
        """Waits until nothing is on its way."""
        for tier in self._tiers:
            tier.flush()

    def close(self) -> None:
        """Ends the threads; blocks on a disk stay."""
        for tier in self._tiers:
            tier.close()

    def report(self) -> Mapping[str, TierUse]:
        """What each tier of all pools holds, and what went through."""
        n_bytes: dict[str, int] = {}
        counts: dict[str, int] = {}
        for tier in self._tiers:
            for name, n in tier.bytes_used().items():
                n_bytes[name] = n_bytes.get(name, 0) + n
            for name, n in dataclasses.asdict(tier.counts).items():
                counts[name] = counts.get(name, 0) + n
        down = {"written", "unwritten", "fetched", "damaged"}
        return {
            name: TierUse(
                n_bytes=n,
                counts={k: x for k, x in counts.items() if (k in down) == (name == "disk")},
            )
            for name, n in n_bytes.items()
        }

    def _open(self, pool: int, fingerprints: Sequence[bytes]) -> Tiering:
        config, each = self._config, self._plan.pools[pool].block_bytes
        whole = sum(p.n_blocks * p.block_bytes for p in self._plan.pools)
        share = self._plan.pools[pool].n_blocks * each / whole
        n_host = int(config.host_bytes * share) // each
        if n_host < 1:
            raise BadConfig(
                f"{config.host_bytes} bytes of the host have no room for a block of {each} bytes "
                "in each pool; give more"
            )
        disk = None
        if config.disk is not None:
            n_disk = int(config.disk_bytes * share) // each
            if n_disk < 1:
                raise BadConfig(
                    f"{config.disk_bytes} bytes of the disk have no room for a block of {each} "
                    "bytes in each pool; give more"
                )
            config.disk.mkdir(parents=True, exist_ok=True)
            path = config.disk / f"pool-{pool}.blocks"
            sizes = [g.block_size for g in self._plan.groups if g.pool == pool]
            n_name = 4 * max(sizes) + _NAME_REST
            file = BlockFile(path, each, n_disk, *fingerprints, n_name=n_name)
            disk = DiskTier(file, name=block_name, policy=config.policy)
        store = self._stores[pool]
        return Tiering(
            HostTier(TierIndex(n_host, policy=config.policy), each),
            disk,
            gather=lambda ids: self._device.take_blocks(store, ids),
            scatter=lambda ids, data: self._device.put_blocks(store, ids, data),
        )

    def _is_worth(self, n_tokens: int, n_bytes: int) -> bool:
        known = self._token_s and self._byte_s
        faster = n_bytes * self._byte_s < n_tokens * self._token_s
        return bool(self._config.always or not known or faster)

    def _load(
        self, wanted: Sequence[Mapping[_Entry, None]], held: Sequence[list[int]], n_bytes: int
    ) -> bool:
        # What the hit has on the device must not go for the rest of it.
        for pool, ids in zip(self._pools, held, strict=True):
            pool.touch(ids)
        fits = all(len(k) <= p.n_free for k, p in zip(wanted, self._pools, strict=True))
        start = time.perf_counter()
        for i, pool in enumerate(self._pools):
            keys = list(wanted[i]) if fits else []
            new = pool.take(len(keys))
            self._tiers[i].load(keys, new)
            for block, (group, entry) in zip(new, keys, strict=True):
                pool.register(block, group, entry)
            pool.free((held[i] + new)[::-1])
        if fits and self._n_timed < _N_TIMED:
            self._device.wait()  # sync: the first loads are timed
            self._byte_s, self._n_timed = (time.perf_counter() - start) / n_bytes, self._n_timed + 1
        return fits


def open_tiers(
    config: TierConfig | None,
    on_device: PoolStores,
    manager: BlockManager,
    device: Device,
    identity: Mapping[str, str],
) -> Tiers | None:
    """The tiers of a cache, if it has some."""
    if config is None:
        return None
    fingerprints = () if config.disk is None else tier_fingerprints(device, identity)
    return Tiers(config, on_device, manager, device, fingerprints)


def tier_fingerprints(device: Device, identity: Mapping[str, str]) -> tuple[bytes, ...]:
    """What blocks on a disk must share with another engine to be used by it.

    The fingerprint of sessions, and how blocks lie in the file. Then that of files of before, where
    it told enough: it knew no policy by score, and no identity.
    """
    programs, layout, config = device.programs, device.layout, device.spec.config
    blocks = {
        "size": config.block_size,
        "runs": [store.run for store in layout.stores],
        "stores": list(layout.store_of),
        "buffers": [list(x) for x in layout.buffers],
    }
    found = capture.fingerprint(programs, layout, device.n_vocab, identity)
    names = [fingerprint.digest({**found, "blocks": blocks})]
    if not layout.scored and not any(blocks["runs"]) and set(identity) <= _OF_MODEL_FILES:
        names.append(fingerprint.of_tier(programs.weights_digest, config, layout.groups))
    return tuple(x.encode() for x in names)


class _Both:
    """A pool and the tiers under it, to look blocks up in; ids below 0 are keys of the tiers."""

    def __init__(self, pool: BlockPool, tier: Tiering):
        """Nothing was found yet."""
        self._pool, self._tier = pool, tier
        self.keys: dict[int, _Entry] = {}

    @property
    def n_evicted(self) -> int:
        """As of the pool."""
        return self._pool.n_evicted

    def may_have(self, group: int, digest: bytes) -> bool:
        """True, for a tier says it of whole prefix hashes alone."""
        return True

    def find(self, group: int, entry: PrefixHash) -> int | None:
        """A block of the pool, or a number below 0."""
        found = self._pool.find(group, entry)
        if found is not None or not self._tier.has((group, entry)):
            return found
        self.keys[-len(self.keys) - 1] = (group, entry)
        return -len(self.keys)

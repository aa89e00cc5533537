"""Which arrays each group of layers has: a store of its own, or one that several groups share."""

import dataclasses
from collections.abc import Sequence

from kvrt.attention.scored.layers import ScoredGroup
from kvrt.attention.scored.policy import ScoredPolicy
from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.config_rules import check_index_keys
from kvrt.errors import BadConfig
from kvrt.kv_types import CHANNEL_CODECS
from kvrt.options.cache import CacheConfig
from kvrt.paged.layout.spec import PagedPlan
from kvrt.sizes import StoreSpec, pool_extent, store_specs, types_of
from kvrt.store.recurrent import n_states
from kvrt.upkeep.sharded import RotatedBuffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The device's arrays, and who points into them.

    Attributes:
      groups: attention layers; those of a group have one list of blocks, and one slot a token.
      stores: keys and values, with cells of their own each.
      store_of: by group, the index of its store.
      buffers: by group, the arrays of the store that its layers have.
      recurrent: recurrent layers, or None.
      n_states: states of each recurrent layer.
      scored: attention layers that keep tokens by score; they are in `recurrent`.
    """

    groups: tuple[GroupSpec, ...]
    stores: tuple[StoreSpec, ...]
    store_of: tuple[int, ...]
    buffers: tuple[tuple[int, ...], ...]
    recurrent: RecurrentSpec | None
    n_states: int
    scored: tuple[ScoredGroup, ...] = ()

    @property
    def n_layers(self) -> int:
        """Layers that a model runs, one behind the other; those of index keys are not run."""
        n = len(self.recurrent_layers)
        n_index = sum(len(group.indexed.keys_of) for group in self.groups if group.indexed)
        return n + sum(len(group.all_layers) for group in self.groups) - n_index

    @property
    def policy(self) -> ScoredPolicy | None:
        """What keeps tokens by score; None where nothing does."""
        return self.scored[0].slots[0].policy if self.scored else None

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers that keep a state."""
        return self.recurrent.layers if self.recurrent else ()

    def n_recurrent(self, end: int) -> int:
        """Layers before one that keep a state."""
        return sum(x < end for x in self.recurrent_layers)

    @property
    def exit_layer(self) -> int:
        """The first layer from which on none keeps anything; all layers where there is none."""
        own = [x for g in self.groups for x in g.layers]
        return min(max((*own, *self.recurrent_layers)) + 1, self.n_layers)

    @property
    def skips_unwanted(self) -> bool:
        """Whether the last layers only read what others keep, and have no work without logits."""
        return self.exit_layer < self.n_layers

    @property
    def stored(self) -> list[tuple[GroupSpec, StoreSpec]]:
        """Each group with the store that has its keys and values."""
        return [(g, self.stores[i]) for g, i in zip(self.groups, self.store_of, strict=True)]

    def members(self, store: int) -> list[int]:
        """Indices of the groups that point into a store."""
        return [i for i, s in enumerate(self.store_of) if s == store]


def rotated_buffers(layout: Layout, store: int) -> list[RotatedBuffers]:
    """The arrays of a store by how keys in them are rotated."""
    members, groups = layout.members(store), layout.groups
    one = groups[members[0]]
    if all(groups[i].rope == one.rope for i in members):
        return [RotatedBuffers(spec=one, buffers=tuple(range(layout.stores[store].n_buffers)))]
    return [RotatedBuffers(spec=groups[i], buffers=layout.buffers[i], group=i) for i in members]


def mixes_rotations(layout: Layout) -> bool:
    """Whether a store has keys that are rotated in different ways."""
    return any(len(rotated_buffers(layout, i)) > 1 for i in range(len(layout.stores)))


def cell_layout(
    groups: Sequence[GroupSpec],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    n_pinned: int = 0,
) -> Layout:
    """A store for each group; `n_pinned` as in `kvrt.sizes.extent`.

    Raises:
      BadConfig: there are KV dtypes for another number of groups, or a layer is of two kinds.
    """
    _check_layers(groups, recurrent)
    return Layout(
        groups=tuple(groups),
        stores=store_specs(groups, config, n_pinned),
        store_of=tuple(range(len(groups))),
        buffers=tuple(tuple(range(len(g.layers))) for g in groups),
        recurrent=recurrent,
        n_states=n_states(config) if recurrent else 0,
    )


def paged_layout(
    groups: Sequence[GroupSpec],
    recurrent: RecurrentSpec | None,
    plan: PagedPlan,
    config: CacheConfig,
    hash_block_size: int | None = None,
) -> tuple[Layout, tuple[int, ...]]:
    """A store for each pool of cells, and by group of the layout the plan's group that it is of.

    A plan's group may hold layers of several of the model's, which differ in how they rotate.
    Layers that read the keys and values of others go with those, whether the plan has groups of
    them or not: they have no blocks, and no slots. Keys by channel are quantized in runs of whole
    blocks, or of `hash_block_size` tokens where hits end within blocks.

    Raises:
      BadConfig: a layer is of two kinds.
    """
    _check_layers(groups, recurrent)
    places = [(i, g) for i, g in enumerate(plan.groups) if g.kind not in ("recurrent", "shared")]
    pools = list(dict.fromkeys(g.pool for _, g in places))
    found = []
    for i, of in places:
        for spec in groups:
            layers = tuple(x for x in of.layers if x in spec.layers)
            if layers:
                buffers = tuple(map(of.layers.index, layers))
                readers = tuple(pair for pair in spec.kv_of if pair[1] in layers)
                part = dataclasses.replace(spec, layers=layers, kv_of=readers)
                found.append((i, part, buffers))
    states = [plan.pools[g.pool].n_blocks for g in plan.groups if g.kind == "recurrent"]
    stores = (_pool_store(groups, plan, pool, config, hash_block_size) for pool in pools)
    layout = Layout(
        groups=tuple(spec for _, spec, _ in found),
        stores=tuple(stores),
        store_of=tuple(pools.index(plan.groups[i].pool) for i, _, _ in found),
        buffers=tuple(buffers for _, _, buffers in found),
        recurrent=recurrent,
        n_states=sum(states),
    )
    return layout, tuple(i for i, _, _ in found)


def _check_layers(groups: Sequence[GroupSpec], recurrent: RecurrentSpec | None) -> None:
    """Refuses layers that read keys of others and are something else, or read what none keeps."""
    check_index_keys(groups)
    if not any(g.kv_of for g in groups):
        return
    found = [x for g in groups for x in g.all_layers] + [*(recurrent.layers if recurrent else ())]
    twice = sorted({x for x in found if found.count(x) > 1})
    if twice:
        raise BadConfig(
            f"layer {twice[0]} is in two groups, or recurrent as well; a layer keeps keys and "
            "values, reads those of another, or has a state: name it once"
        )


def _pool_store(
    groups: Sequence[GroupSpec],
    plan: PagedPlan,
    pool: int,
    config: CacheConfig,
    hash_block_size: int | None,
) -> StoreSpec:
    members = [g for g in plan.groups if g.pool == pool and g.kind != "shared"]
    of = members[0]
    # Layers of a pool have keys and values of one shape and type.
    i, spec = next((i, g) for i, g in enumerate(groups) if of.layers[0] in g.layers)
    type_k, type_v = types_of(groups, config)[i]
    store = StoreSpec(
        n_buffers=plan.pools[pool].n_buffers,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.dim_k,
        head_dim_v=spec.dim_v,
        extent=pool_extent(plan.pools[pool].n_blocks, of.block_size, of.array_block),
        type_k=type_k,
        type_v=type_v,
    )
    if type_k not in CHANNEL_CODECS:
        return store
    run = hash_block_size or of.block_size
    # In each group a sequence has a run that is not over; and after a hit within a block its copy
    # has what another sequence's run had then.
    n_runs = config.n_seq_max * len(members) * (1 if run == of.block_size else 2)
    return dataclasses.replace(store, run=run, n_seq_max=n_runs)

"""Which rows each group of layers has: a store of its own, or one that several groups share."""

import dataclasses
from collections.abc import Sequence

from kvrt.config import CacheConfig, GroupSpec, RecurrentSpec, StoreSpec, store_spec
from kvrt.store.recurrent import n_states


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The device's arrays, and who points into them.

    Attributes:
      groups: attention layers; those of a group have one list of blocks, and one slot a token.
      stores: rows, with cells of their own each.
      store_of: by group, the index of its store; the i-th layer has the i-th arrays of it.
      recurrent: recurrent layers, or None.
      n_states: rows of their states.
    """

    groups: tuple[GroupSpec, ...]
    stores: tuple[StoreSpec, ...]
    store_of: tuple[int, ...]
    recurrent: RecurrentSpec | None
    n_states: int

    def members(self, store: int) -> list[int]:
        """Indices of the groups that point into a store."""
        return [i for i, s in enumerate(self.store_of) if s == store]

    def owner(self, store: int) -> GroupSpec:
        """The one group of a store."""
        (group,) = self.members(store)
        return self.groups[group]


def cell_layout(
    groups: Sequence[GroupSpec], recurrent: RecurrentSpec | None, config: CacheConfig
) -> Layout:
    """A store for each group."""
    return Layout(
        groups=tuple(groups),
        stores=tuple(store_spec(g, config) for g in groups),
        store_of=tuple(range(len(groups))),
        recurrent=recurrent,
        n_states=n_states(config) if recurrent else 0,
    )

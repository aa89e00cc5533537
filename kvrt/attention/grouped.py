"""SelfExtend as the paper defines it: exact positions near a query, grouped ones beyond.

A query at p sees a key at r less than W back by their exact positions; any other by r // G, as if
it stood at p // G + W - W // G, so that distances go on from W without a gap. Keys that are stored
unrotated are rotated in both ways; those that are stored rotated, by the difference of both.

Source: arXiv:2401.01325, sec. 3.2.
"""

import dataclasses

import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention import rope
from kvrt.attention.view import AnyView, BlockView
from kvrt.config import GroupSpec, RopeSpec
from kvrt.options.cache import CacheConfig, SelfExtend


@state
class GroupedRope:
    """What rotates cached keys to grouped positions, and how near exact ones count instead."""

    rope: rope.RopeTables
    ga_w: int = dataclasses.field(metadata=dict(static=True))

    def is_near(
        self, pos: Int32[AnyArray, " T"], k_pos: Int32[AnyArray, "#T B"]
    ) -> Bool[AnyArray, "T B"]:
        """Which pairs are compared by their exact positions; cells of all tokens, or of each."""
        return pos[:, None] - k_pos < self.ga_w

    def specs(self) -> "GroupedRope":
        """How it lies on a mesh."""
        return dataclasses.replace(self, rope=self.rope.specs())


@dataclasses.dataclass(frozen=True)
class GroupedTables:
    """Rotations to grouped positions: of queries with all cells, and of the step's own keys."""

    queries: rope.RopeTables
    keys: rope.RopeTables
    ga_w: int

    def tokens(
        self, q: Float[Array, "T Q D"], k: Float[Array, "T H D"]
    ) -> tuple[Float[Array, "T Q D"], Float[Array, "T H D"]]:
        """The step's queries and keys, not yet rotated, at grouped positions."""
        return self.queries.rotate_tokens(q), self.keys.rotate_tokens(k)

    def behind(self, first: int) -> "GroupedTables":
        """The same for tokens whose channels before `first` are a latent."""
        queries, keys = (dataclasses.replace(x, first=first) for x in (self.queries, self.keys))
        return dataclasses.replace(self, queries=queries, keys=keys)

    @property
    def cells(self) -> GroupedRope:
        """What rotates cached keys."""
        return GroupedRope(rope=self.queries, ga_w=self.ga_w)


def uses_grouped_positions(group: GroupSpec, config: CacheConfig) -> bool:
    """Whether a group's layers read beyond the window by grouped positions."""
    extend = config.self_extend
    reads = extend is not None and extend.kind == "paper" and extend.ga_n > 1
    return reads and group.mask.kind == "full" and group.rope is not None


def grouped_tables(
    spec: RopeSpec, view: AnyView, n_ctx: int, extend: SelfExtend, *, unrotated: bool
) -> GroupedTables:
    """Rotations to grouped positions for the tokens of `view`, and for its cells as stored."""
    n, w = extend.ga_n, extend.ga_w
    own, cells = jnp.asarray(view.pos) // n, view.cell_pos // n
    cells = cells if unrotated else cells - view.cell_pos
    queries = dataclasses.replace(view, pos=own + (w - w // n), cell_pos=cells)
    keys = dataclasses.replace(view, pos=own)
    return GroupedTables(
        queries=rope.make(spec, queries, n_ctx, unrotated=unrotated, moved=not unrotated),
        keys=rope.make(spec, keys, n_ctx, unrotated=False),
        ga_w=w,
    )


def for_one_query(view: BlockView, extend: SelfExtend, *, unrotated: bool) -> BlockView:
    """The view of a single token, its cells at the positions that give grouped distances.

    Only distances count, so a key beyond the window moves by as much as its query would: one
    rotation and one product for each key. Of keys that are stored rotated the view has by how
    much each moves, for positions of cells.
    """
    n, w = extend.ga_n, extend.ga_w
    pos = jnp.asarray(view.pos)[0]
    moved = view.cell_pos // n + (pos - pos // n - (w - w // n))
    near = pos - view.cell_pos < w
    cells = jnp.where(near, view.cell_pos, moved)
    cells = cells if unrotated else cells - view.cell_pos
    return dataclasses.replace(view, cell_pos=cells)

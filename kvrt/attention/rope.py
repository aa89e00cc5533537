"""RoPE of one step: tables for its tokens, and for cells whose keys it rotates.

Both are made once a step and shared by all layers of a group.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from kvrt.arrays import Array, Float, Int32, state
from kvrt.attention.view import AnyView, SeqView, by_block
from kvrt.config import RopeSpec
from kvrt.store import rope
from kvrt.store.shards import CELLS


@state
class RopeTables:
    """Cosines and sines, times the magnitude of the rule; `tokens` as `store.rope.rotate_by` wants.

    `cell_cos` and `cell_sin` are None where keys are compared as they are stored; else only the
    listed blocks are filled, the others hold zeros and are never read. Of the tokens' channels
    those from `first` on are rotated: before them comes a latent, which a cache has in another
    array than its keys.
    """

    tokens: Float[Array, "2 T C"]
    cell_cos: Float[Array, "N R B"] | None
    cell_sin: Float[Array, "N R B"] | None
    layout: str = dataclasses.field(metadata=dict(static=True))
    first: int = dataclasses.field(default=0, metadata=dict(static=True))

    @property
    def cells(self) -> tuple[Array, Array] | None:
        """Cosines and sines of the cells where their keys are to be rotated, else None."""
        if self.cell_cos is None or self.cell_sin is None:
            return None
        return self.cell_cos, self.cell_sin

    def rotate_tokens(self, x: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        """Queries or keys of the step's tokens, rotated to their positions."""
        return self._behind(x) if self.first else rope.rotate_by(x, self.tokens, self.layout)

    def _behind(self, x: Array) -> Array:
        latent, keys = jnp.split(x, [self.first], axis=2)
        rotated = rope.rotate_by(keys, self.tokens, self.layout)
        return jnp.concatenate([latent, rotated], axis=2)

    def rotate_cells(self, keys: Float[Array, "H D _"], ids: Int32[Array, " _"]) -> Array:
        """Cached keys of some blocks, side by side, as attention compares them."""
        if self.cells is None:
            return keys
        cos, sin = (_joined(table, ids) for table in self.cells)
        return rope.rotate_block(keys, cos, sin, self.layout)

    def rotate_slots(self, keys: Float[Array, "H D M"], slots: Int32[Array, " M"]) -> Array:
        """Cached keys of some cells, likewise."""
        if self.cells is None:
            return keys
        at = slots // self.cells[0].shape[2], slots % self.cells[0].shape[2]
        cos, sin = (table[at[0], :, at[1]].T for table in self.cells)
        return rope.rotate_block(keys, cos, sin, self.layout)

    def rotate_units(
        self, keys: Float[Array, "H T K D _"], found: Int32[Array, "H T K"]
    ) -> Float[Array, "H T K D _"]:
        """Cached keys of some units, by kv head and token, likewise."""
        unit = keys.shape[-1]
        within = jnp.arange(unit, dtype=jnp.int32)[None, None, None]
        slots = found[..., None] * unit + within

        def of_head(keys: Array, slots: Array) -> Array:
            columns = jnp.moveaxis(keys, 2, 0).reshape(1, keys.shape[2], -1)
            rotated = self.rotate_slots(columns, slots.reshape(-1))
            return jnp.moveaxis(rotated.reshape(keys.shape[2], *slots.shape), 0, 2)

        return jax.vmap(of_head)(keys, slots)

    def rotate_channels(
        self, parts: Float[Array, "H X C"], channels: Sequence[Sequence[int]]
    ) -> Float[Array, "H r C"]:
        """Some channels of all cached keys, likewise; their partners lie behind them in `parts`."""
        assert self.cells is not None, "keys that are stored unrotated"
        _, pair, sign = rope.rope_partners(
            np.asarray(channels, np.int32), 2 * self.cells[0].shape[1], self.layout
        )
        cos, sin = (_joined(x, jnp.arange(x.shape[0], dtype=jnp.int32)) for x in self.cells)
        cos = jnp.pad(cos, ((0, 1), (0, 0)), constant_values=1.0)[pair]
        sin = jnp.pad(sin, ((0, 1), (0, 0)))[pair]
        own, partners = jnp.split(parts, 2, axis=1)
        return own * cos + partners * (sin * jnp.asarray(sign)[..., None])

    def specs(self) -> "RopeTables":
        """How the tables lie on a mesh: those of cells are divided as the cells are."""
        cells = None if self.cells is None else P(CELLS)
        new: dict[str, Any] = {"tokens": P(), "cell_cos": cells, "cell_sin": cells}
        return dataclasses.replace(self, **new)


def _joined(table: Float[Array, "N R B"], ids: Int32[Array, " _"]) -> Float[Array, "R _"]:
    if ids.shape[0] == 1:
        return table[ids[0]]
    found = table[ids]
    return jnp.transpose(found, (1, 0, 2)).reshape(found.shape[1], -1)


def make(
    spec: RopeSpec, view: AnyView, n_ctx: int, *, unrotated: bool, moved: bool = False
) -> RopeTables:
    """Tables for the tokens of `view`, and for the cells it reads where their keys are rotated.

    Args:
      spec: how.
      view: positions of its tokens and its cells.
      n_ctx: cells of the cache.
      unrotated: keys are stored so, and are rotated to the cells' positions.
      moved: they are stored rotated, and move by as many positions as the view has in `cell_pos`.
        They have the magnitude of the rule already.
    """
    freqs = jnp.asarray(rope.frequencies(spec, n_ctx))
    scale = jnp.float32(rope.magnitude(spec, n_ctx))
    cos, sin = rope.angles(freqs, view.pos)
    by = jnp.float32(1) if moved else scale
    cells = _of_cells(freqs, by, view) if unrotated or moved else (None, None)
    # Without the barrier XLA makes the cosines anew in every layer, for queries and keys apart.
    tokens = lax.optimization_barrier(rope.by_channel(cos * scale, sin * scale, spec.layout))
    return RopeTables(tokens=tokens, cell_cos=cells[0], cell_sin=cells[1], layout=spec.layout)


def _of_cells(freqs: Array, scale: Array, view: AnyView) -> tuple[Array, ...]:
    """Cosines and sines of the cells that a view reads, whose keys are to be rotated."""
    made = functools.partial(_cell_tables, freqs)
    return tuple(table * scale for table in by_block(made, view))


def _cell_tables(freqs: Float[Array, " R"], view: AnyView) -> tuple[Array, Array]:
    """Tables of the cells that a view reads, those of shared runs among them."""
    of_lists = rope.seq_tables if isinstance(view, SeqView) else rope.block_tables
    tables = of_lists(freqs, view.cell_pos, view.blocks, view.n_blocks)
    shared = view.shared if isinstance(view, SeqView) else None
    if shared is None:
        return tables

    def add_run(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        def add(j: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            return rope.add_block(freqs, view.cell_pos, shared.tables[i, j], found)

        return lax.fori_loop(0, shared.n_blocks[i], add, found)

    return lax.fori_loop(0, shared.n_runs, add_run, tables)

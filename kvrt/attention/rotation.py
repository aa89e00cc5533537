"""RoPE of one step: tables for its tokens, and for the cells it reads where keys are stored raw.

Both are made once a step and shared by all layers of a group.
"""

import dataclasses

import jax.numpy as jnp

from kvrt.arrays import Array, Float, Int32, state
from kvrt.attention import sharded
from kvrt.attention.view import RowView, View
from kvrt.config import RopeSpec
from kvrt.store import rope


@state
class Rotation:
    """Cosines and sines, times the magnitude of the rule.

    `cell_cos` and `cell_sin` are None where keys are stored rotated; else only the listed blocks
    are filled, the others hold zeros and are never read.
    """

    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]
    cell_cos: Float[Array, "N R B"] | None
    cell_sin: Float[Array, "N R B"] | None
    layout: str = dataclasses.field(metadata=dict(static=True))

    def tokens(self, x: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        """Queries or keys of the step's tokens turned to their positions."""
        return rope.rotate(x, self.cos, self.sin, self.layout)

    def cells(self, keys: Float[Array, "H D _"], ids: Int32[Array, " _"]) -> Array:
        """Stored keys of some blocks, side by side, as attention wants them."""
        if self.cell_cos is None or self.cell_sin is None:
            return keys
        cos, sin = (_joined(table, ids) for table in (self.cell_cos, self.cell_sin))
        return rope.rotate_block(keys, cos, sin, self.layout)


def _joined(table: Float[Array, "N R B"], ids: Int32[Array, " _"]) -> Float[Array, "R _"]:
    if ids.shape[0] == 1:
        return table[ids[0]]
    found = table[ids]
    return jnp.transpose(found, (1, 0, 2)).reshape(found.shape[1], -1)


def make(spec: RopeSpec, view: View | RowView, n_ctx: int, *, raw_keys: bool) -> Rotation:
    """Tables for the tokens of `view`, and with raw_keys for the cells of its blocks."""
    freqs = jnp.asarray(rope.frequencies(spec, n_ctx))
    scale = jnp.float32(rope.magnitude(spec, n_ctx))
    cos, sin = rope.angles(freqs, view.pos)
    cells = (None, None)
    if raw_keys:

        def made(view: View | RowView) -> tuple[Array, Array]:
            if isinstance(view, RowView):
                return rope.row_tables(freqs, view.cell_pos, view.tables, view.n_blocks)
            return rope.block_tables(freqs, view.cell_pos, view.blocks, view.n_blocks)

        tables = made(view) if view.shards is None else sharded.by_block(made, view)
        cells = tuple(table * scale for table in tables)
    return Rotation(
        cos=cos * scale, sin=sin * scale, cell_cos=cells[0], cell_sin=cells[1], layout=spec.layout
    )

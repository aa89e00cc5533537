"""RoPE of one step: tables for its tokens, and for the cells it reads where keys are stored raw.

Both are made once a step and shared by all layers of a group.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float, Int32, state
from kvrt.attention.view import View
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

    def cells(self, keys: Float[Array, "H D B"], block: Int32[Array, ""]) -> Array:
        """Stored keys of one block as attention wants them."""
        if self.cell_cos is None or self.cell_sin is None:
            return keys
        return rope.rotate_block(keys, self.cell_cos[block], self.cell_sin[block], self.layout)


def make(spec: RopeSpec, view: View, n_ctx: int, *, raw_keys: bool) -> Rotation:
    """Tables for the tokens of `view`, and with raw_keys for the cells of its blocks."""
    freqs = jnp.asarray(rope.frequencies(spec, n_ctx))
    scale = jnp.float32(rope.magnitude(spec, n_ctx))
    cos, sin = rope.angles(freqs, view.pos)
    cells = _cell_tables(freqs, scale, view) if raw_keys else (None, None)
    return Rotation(
        cos=cos * scale, sin=sin * scale, cell_cos=cells[0], cell_sin=cells[1], layout=spec.layout
    )


def _cell_tables(freqs: Array, scale: Array, view: View) -> tuple[Array, Array]:
    n, b = view.cell_pos.shape
    zeros = jnp.zeros((n, freqs.shape[0], b), jnp.float32)

    def fill(i: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
        block = view.blocks[i]
        cos, sin = rope.angles(freqs, view.cell_pos[block])
        return (
            tables[0].at[block].set(cos.T * scale, mode="drop"),
            tables[1].at[block].set(sin.T * scale, mode="drop"),
        )

    return lax.fori_loop(0, view.n_blocks, fill, (zeros, zeros))

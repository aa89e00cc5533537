"""The pure step: tokens in, logits out, rows and cells of the cache updated.

Nothing here is jitted: `programs.py` compiles it, and a user may call it inside a program of
their own, loops and context shifts included.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Float, Int32, state
from kvrt.attention import view
from kvrt.attention.attend import step_attention
from kvrt.cells import Cells, owner_bits, place
from kvrt.config import CacheConfig
from kvrt.engine.batch import Batch
from kvrt.store.store import KVStore, write_rows


@state
class Cache:
    """Rows and their meaning, on the device."""

    store: KVStore
    cells: Cells


def forward(
    model: Any, cache: Cache, batch: Batch, config: CacheConfig
) -> tuple[Float[Array, "R V"], Cache]:
    """Runs a batch: attends to old cells and to itself, then writes.

    Args:
      model: a `kvrt.attention.Decoder`.
      cache: donated by jitted callers; no shift may be pending in the blocks that are read.
      batch: tokens and their plan.
      config: sizes, key frame and implementation.

    Returns:
      Logits of batch.out_ids and the cache with the tokens' rows and cells.
    """
    cell_pos, cell_seqs = view.blocked(
        cache.cells.pos, cache.cells.seqs, config.n_blocks, config.block_size
    )
    sight = view.View(
        pos=batch.pos,
        bits=owner_bits(cache.cells, batch.seq_ids),
        blocks=batch.blocks,
        n_blocks=batch.n_blocks,
        cell_pos=cell_pos,
        cell_seqs=cell_seqs,
    )
    attention = step_attention(cache.store, sight, model.groups, config)
    logits = model(batch.tokens, attention, batch.out_ids)
    layers = sorted(attention.k_new)
    rows = ([attention.k_new[i] for i in layers], [attention.v_new[i] for i in layers])
    store = write_rows(cache.store, _after(logits, batch.slots), *rows)
    cells = place(cache.cells, batch.slots, batch.pos, batch.seq_ids)
    return logits, Cache(store=store, cells=cells)


def _after(logits: Float[Array, "R V"], slots: Int32[AnyArray, " T"]) -> Int32[Array, " T"]:
    """The slots, known only once the logits are.

    Without a dependency XLA may write a layer before it is read, and copies the layer to be able
    to; an optimization barrier is gone before that is decided. The clamp is always 0.
    """
    bits = lax.bitcast_convert_type(logits[0, 0], jnp.int32)
    return jnp.asarray(slots) + lax.clamp(jnp.int32(0), bits, jnp.int32(0))


def on_device(cells: Cells) -> Cells:
    """A copy of host cells on the default device."""
    return Cells(
        # jnp.array copies: donating an alias would let a step write into the host's cells.
        pos=jnp.array(cells.pos),
        delta=jnp.array(cells.delta),
        seqs=jnp.array(cells.seqs),
    )

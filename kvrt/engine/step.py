"""The pure step: tokens in, logits out, rows and cells of the cache updated.

Nothing here is jitted: `programs.py` compiles it, and a user may call it inside a program of
their own, loops and context shifts included.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Float, Int32, state
from kvrt.attention import view
from kvrt.attention.attend import step_attention
from kvrt.cells import Cells, owner_bits, place
from kvrt.cells import create as create_cells
from kvrt.config import CacheConfig, GroupSpec, RecurrentSpec, extent
from kvrt.engine.batch import Batch, Places
from kvrt.store import recurrent
from kvrt.store import store as rows
from kvrt.store.store import KVStore


@state
class Cache:
    """Rows and their meaning, by group, on the device; states where layers are recurrent."""

    stores: tuple[KVStore, ...]
    cells: tuple[Cells, ...]
    states: recurrent.StateStore | None = None


def create(
    groups: Sequence[GroupSpec], config: CacheConfig, spec: RecurrentSpec | None = None
) -> Cache:
    """An empty cache: zeroed rows and states, empty cells."""
    return Cache(
        stores=tuple(rows.create(g, config) for g in groups),
        cells=tuple(
            on_device(create_cells(extent(g, config).n_cells, config.n_seq_max)) for g in groups
        ),
        states=recurrent.create(spec, config) if spec else None,
    )


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
    by_group = list(zip(model.groups, cache.stores, cache.cells, batch.places, strict=True))
    views = [[_view(g, cells, batch, places, config)] for g, _, cells, places in by_group]
    spec: RecurrentSpec | None = model.recurrent
    tables = cache.states.tables if cache.states else ()
    held = dict(zip(spec.layers if spec else (), tables, strict=True))
    attention = step_attention(cache.stores, views, model.groups, config, held, batch.states)
    logits = model(batch.tokens, attention, batch.out_ids)
    stores, cells = [], []
    for group, store, old, places in by_group:
        new = ([x[i] for i in group.layers] for x in (attention.k_new, attention.v_new))
        stores.append(rows.write_rows(store, _after(logits, places.slots), *new))
        cells.append(place(old, places.slots, batch.pos, batch.seq_ids))
    states = spec and recurrent.StateStore(tables=tuple(attention.states[i] for i in spec.layers))
    return logits, Cache(stores=tuple(stores), cells=tuple(cells), states=states)


def _view(
    group: GroupSpec, cells: Cells, batch: Batch, places: Places, config: CacheConfig
) -> view.View:
    size = extent(group, config)
    pos, seqs = view.blocked(cells.pos, cells.seqs, size.n_blocks, size.block_size)
    return view.View(
        pos=batch.pos,
        bits=owner_bits(cells, batch.seq_ids),
        blocks=places.blocks,
        n_blocks=places.n_blocks,
        cell_pos=pos,
        cell_seqs=seqs,
    )


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

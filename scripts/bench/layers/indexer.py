"""Attention of a layer of latents over what an indexer chooses, against attention over all cells.

    python -m scripts.bench.layers.indexer --n_tokens 7000

Random keys and values in f32, one sequence, interleaved runs. The time of an indexer has its
scores, the choice and attention; projections are left out.
"""

import functools

import jax
import jax.numpy as jnp
from absl import flags

from kvrt import BlockView, GroupSpec, LayerAttention, LayerKV, RopeSpec, TokenQKV, attend
from kvrt.arrays import Array, Float
from kvrt.attention.select import indexer
from kvrt.attention.types import AttendArgs
from scripts._lib import commands, measure, rounds

_N_TOKENS = flags.DEFINE_integer("n_tokens", 7000, "Cached tokens.", lower_bound=1)
_N_CELLS = flags.DEFINE_list("n_cells", ["512", "2048"], "Tokens that a query reads.")
_STEPS = flags.DEFINE_list("steps", ["1", "64"], "Tokens of a step.")
_N_HEADS = flags.DEFINE_integer("n_heads", 16, "Query heads, and index heads.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Runs of each side.", lower_bound=1)
# Of DeepSeek-V3.2: a latent, what is rotated of a key, and an index key.
_RANK, _ROPE, _INDEX, _BLOCK = 512, 64, 128, 256


def main() -> None:
    for n_step in map(int, _STEPS.value):
        view = _view(_N_TOKENS.value, n_step)
        args, index = _args(view, _RANK, 0), _args(view, _INDEX - _ROPE, 1)
        weights = _drawn(2, n_step, _N_HEADS.value)
        for n_cells in map(int, _N_CELLS.value):
            chosen = jax.jit(functools.partial(_indexed, n_cells=n_cells))
            sides = {
                "indexer": rounds.timed(functools.partial(chosen, args, index, weights)),
                "all cells": rounds.timed(functools.partial(_dense, args)),
            }
            times = rounds.interleaved(sides, _ROUNDS.value)
            sizes = dict(n_tokens=_N_TOKENS.value, n_step=n_step, n_cells=n_cells)
            faster = times.over("all cells", "indexer", digits=2)
            measure.emit("indexer", **sizes, ms={x: times.ms(x) for x in times}, faster=faster)


def _indexed(args: AttendArgs, index: AttendArgs, weights: Array, *, n_cells: int) -> Array:
    found = indexer.candidates(index[2], n_cells)
    by = indexer.Index(args=index, weights=weights, candidates=found)
    return indexer.attend_indexed(args, by, n_cells, attend)


@jax.jit
def _dense(args: AttendArgs) -> Array:
    return attend(*args)[0]


def _drawn(seed: int, *shape: int) -> Float[Array, "..."]:
    return jax.random.normal(jax.random.key(seed), shape)


def _view(n: int, n_step: int) -> BlockView:
    """A step behind n tokens of a sequence, which lie in order."""
    n_blocks = -(-n // _BLOCK)
    held = jnp.arange(n_blocks * _BLOCK, dtype=jnp.int32).reshape(n_blocks, _BLOCK)
    return BlockView(
        pos=jnp.arange(n, n + n_step, dtype=jnp.int32),
        bits=jnp.ones((n_step, 1), jnp.uint32),
        blocks=jnp.arange(n_blocks, dtype=jnp.int32),
        n_blocks=jnp.int32(n_blocks),
        cell_pos=jnp.where(held < n, held, -1),
        cell_seqs=(held < n).astype(jnp.uint32)[..., None],
    )


def _args(view: BlockView, rank: int, layer: int) -> AttendArgs:
    """What a layer whose latents have `rank` channels gives attention."""
    (n_blocks, b), n, d = view.cell_pos.shape, view.n_tokens, rank + _ROPE
    rope = RopeSpec(n_rot=_ROPE)
    group = GroupSpec(
        layers=(layer,), n_kv_heads=1, head_dim=d, latent_rank=rank, rope=rope, scale=0.1
    )
    k = _drawn(3, n, 1, d)
    qkv = TokenQKV(q=_drawn(4, n, _N_HEADS.value, d), k=k, v=k[:, :, :rank])
    kv = LayerKV(k=_drawn(5, n_blocks, 1, _ROPE, b), v=_drawn(6, n_blocks, 1, b, rank))
    return qkv, kv, view, LayerAttention(group=group)


if __name__ == "__main__":
    commands.run(main)

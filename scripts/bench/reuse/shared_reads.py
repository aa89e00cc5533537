"""What sequences share, read once for all, beside one read for each: attention, and an engine.

    python -m scripts.bench.reuse.shared_reads
    python -m scripts.bench.reuse.shared_reads --what engine --model toy --shared 512

Attention is that of one layer with the model's heads over a cache in f32; "each" is what is shipped
without `shared_reads`, "idle" the program with it where nothing is shared. Sides run interleaved.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt import CacheConfig, Engine, GroupSpec, Request
from kvrt.attention import LayerAttention, LayerKV, SeqView, TokenQKV, attend
from kvrt.cells.slots import SeqBlocks, SharedBlocks
from kvrt.options.engine import EngineConfig
from kvrt.serving.reading.runs import find_runs
from kvrt.serving.reading.shared_reads import read_apart
from scripts._lib import commands, measure, rounds, shapes

_WHAT = flags.DEFINE_list("what", ["attention", "engine"], "Of attention, engine.")
_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known model; toy is one of random weights.")
_N_SEQ = flags.DEFINE_integer("n_seq", 16, "Sequences that decode.", lower_bound=2)
_SHARED = flags.DEFINE_list("shared", ["0", "256", "1024", "4096"], "Tokens that all share.")
_N_OWN = flags.DEFINE_integer("own", 128, "Tokens of each sequence alone.", lower_bound=1)
_BLOCK = flags.DEFINE_integer("block_size", 16, "Cells of a block.", lower_bound=1)
_N_ROUNDS = flags.DEFINE_integer("rounds", 30, "Runs of each side; of an engine a tenth.", 1)
_N_HEADS, _N_KV, _HEAD_DIM = 9, 3, 64


def main() -> None:
    for what in _WHAT.value:
        if what == "attention":
            for n_shared in map(int, _SHARED.value):
                _attention(n_shared)
        else:
            _engine(int(_SHARED.value[-1]))


def _view(n_shared: int, size: int) -> tuple[SeqView, SeqView]:
    """Lists of sequences that share n_shared tokens, as they are and with the run apart."""
    n_seq, n_own = _N_SEQ.value, -(-_N_OWN.value // size)
    n_common = n_shared // size
    lists = [
        [*range(n_common), *range(n_common + i * n_own, n_common + (i + 1) * n_own)]
        for i in range(n_seq)
    ]
    n_words = -(-n_seq // 32)
    pos = np.full((n_common + n_seq * n_own, size), -1, np.int32)
    seqs = np.zeros((*pos.shape, n_words), np.uint32)
    bits = np.zeros((n_seq, n_words), np.uint32)
    for s, ids in enumerate(lists):
        at = np.arange(len(ids) * size).reshape(-1, size)
        pos[ids] = np.where(at < n_shared + _N_OWN.value, at, -1)
        bits[s, s // 32] = 1 << s % 32
        seqs[ids, :, s // 32] |= bits[s, s // 32]
    tables = np.array(lists, np.int32)
    n_blocks = np.full(n_seq, len(lists[0]), np.int32)
    found = SeqBlocks(tables=tables, n_blocks=n_blocks)
    n_runs = min(n_seq - 1, 16)
    nothing = SharedBlocks(
        tables=np.zeros((n_runs, tables.shape[1]), np.int32),
        n_blocks=np.zeros(n_runs, np.int32),
        members=np.full((n_runs, n_seq), n_seq, np.int32),
    )
    apart = read_apart(found, find_runs(tables, n_blocks), nothing)
    at = jnp.full(n_seq, n_shared + _N_OWN.value, jnp.int32)
    common = {"pos": at, "bits": bits, "cell_pos": pos, "cell_seqs": seqs}
    sides = (
        SeqView(blocks=x.tables, n_blocks=x.n_blocks, shared=x.shared, **common)
        for x in (dataclasses.replace(found, shared=nothing), apart)
    )
    idle, once = (jax.tree.map(jnp.asarray, x) for x in sides)
    return idle, once


def _attention(n_shared: int) -> None:
    """One layer."""
    size, rng = _BLOCK.value, np.random.default_rng(0)
    idle, once = _view(n_shared, size)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    n, n_blocks = _N_SEQ.value, idle.cell_pos.shape[0]
    q, k, v = (drawn(n, heads, _HEAD_DIM) for heads in (_N_HEADS, _N_KV, _N_KV))
    qkv = TokenQKV(q=q, k=k, v=v)
    k, v = drawn(n_blocks, _N_KV, _HEAD_DIM, size), drawn(n_blocks, _N_KV, size, _HEAD_DIM)
    group = GroupSpec(layers=(0,), n_kv_heads=_N_KV, head_dim=_HEAD_DIM, rope=None)
    sides = {"each": dataclasses.replace(idle, shared=None), "idle": idle, "once": once}
    kv, how = LayerKV(k=k, v=v), LayerAttention(group=group)
    runs = {
        x: rounds.timed(lambda view=view: attend(qkv, kv, view, how)) for x, view in sides.items()
    }
    times = rounds.interleaved(runs, _N_ROUNDS.value, n_warm=3)
    figures = times.figures() | {f"each_over_{x}": times.over("each", x, 2) for x in sides}
    sizes = {"n_seq": n, "n_shared": n_shared, "n_own": _N_OWN.value, "block_size": size}
    measure.emit("shared_reads_attention", **sizes, **figures)


def _engine(n_shared: int) -> None:
    """Requests of one system prompt, which is there; tokens a second while they decode."""
    n, n_own, rng = _N_SEQ.value, _N_OWN.value, np.random.default_rng(0)
    model = shapes.decoder(_MODEL.value)
    size = _BLOCK.value
    n_ctx = -(-(n_shared + n * (n_own + size)) // 512) * 512
    config = CacheConfig(
        n_ctx=n_ctx, n_seq_max=n, block_size=size, attention="chunked", type_k="f32", type_v="f32"
    )
    engines = {
        name: Engine(model, config, EngineConfig(shared_reads=name == "once"))
        for name in ("each", "once")
    }
    system = rng.integers(0, 256, n_shared).tolist()

    def decoding(engine: Engine) -> Iterator[float]:
        """Seconds of the steps in which all requests decode."""
        for j in range(n):
            tokens = (*system, *rng.integers(0, 256, 8).tolist())
            engine.add_request(Request(id=str(j), tokens=tokens, n_predict=n_own))
        while engine.has_work:
            start, decoded = time.perf_counter(), engine.stats().tokens["decode"]
            engine.step()
            if engine.stats().tokens["decode"] == decoded + n:
                yield time.perf_counter() - start

    sides = {name: functools.partial(decoding, engine) for name, engine in engines.items()}
    times = rounds.interleaved(sides, max(_N_ROUNDS.value // 10, 1))
    rates = {f"{name}_tok_s": round(n / times.median(name), 1) for name in times}
    reads = dict(engines["once"].stats().reads)
    sizes = {"n_seq": n, "n_shared": n_shared, "n_own": n_own, "block_size": size}
    measure.emit(
        "shared_reads_engine",
        **sizes,
        **rates,
        each_over_once=times.over("each", "once", 2),
        **reads,
    )


if __name__ == "__main__":
    commands.run(main)

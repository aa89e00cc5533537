"""One token over eight blocks a pass: the same as over the list, and compiled as it should be."""

import os
import shutil
import sys
from pathlib import Path

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec
from kvrt.attention import BlockView, LayerAttention, LayerKV, TokenQKV, attend
from kvrt.jax_settings import compiler_options
from kvrt.sizes import store_spec
from kvrt.store import kv as kv_store

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.layers import sum_code

OPTIMISED = True  # see conftest.py: programs as users have them
ALONE = True  # and none from a folder, of which XLA writes no code

B, D = 256, 64

jitted_attend, jitted_write = jax.jit(attend), jax.jit(kv_store.write_kv)


@pytest.mark.parametrize(("kv_dtype", "n_kv"), [("f32", 1), ("bf16", 4), ("int8", 2)])
def test_eight_blocks_a_pass_are_those_of_the_list(kv_dtype, n_kv):
    """Lists of every length, so that passes and what they leave begin and end anywhere."""
    n_q, d, n = 8, D, 21
    group = GroupSpec(layers=(0,), n_kv_heads=n_kv, head_dim=d, rope=None, soft_cap=3.0)
    config = CacheConfig(n_ctx=n * B, block_size=B, type_k=kv_dtype, type_v=kv_dtype)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((n * B, n_kv, d)).astype(np.float32) for _ in range(2))
    store = kv_store.create(store_spec(group, config))
    store = jitted_write(store, np.arange(n * B, dtype=np.int32), [k], [v])
    q, *own = (3 * rng.standard_normal((1, h, d)).astype(np.float32) for h in (n_q, n_kv, n_kv))
    pos = np.arange(n * B, dtype=np.int32).reshape(n, B)
    order = rng.permutation(n).astype(np.int32)
    for n_blocks in (0, 1, 3, 4, 5, 8, 11, 12, 16, 20, 21):
        view = BlockView(
            pos=np.array([n * B], np.int32),
            bits=np.ones((1, 1), np.uint32),
            blocks=order,
            n_blocks=np.int32(n_blocks),
            cell_pos=pos,
            cell_seqs=np.ones((n, B, 1), np.uint32),
        )
        found, wanted = (
            jitted_attend(
                TokenQKV(q=q, k=own[0], v=own[1]),
                LayerKV(k=store.k[0], v=store.v[0]),
                view,
                LayerAttention(group=group, rope=None, implementation=name),
            )
            for name in ("chunked", "reference")
        )
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=3e-6)


@pytest.fixture(scope="module", params=["f32", "bf16", "f16", "int8"])
def compiled(request, tmp_path_factory):
    """A layer of SmolLM2's behind a list of 12 blocks; numbers of its keys, and what XLA wrote."""
    kv_dtype, folder = request.param, tmp_path_factory.mktemp("dump")
    n, n_kv, n_q = 12, 3, 9
    group = GroupSpec(layers=(0,), n_kv_heads=n_kv, head_dim=D, rope=None)
    config = CacheConfig(n_ctx=n * B, block_size=B, type_k=kv_dtype, type_v=kv_dtype)
    store = jax.eval_shape(lambda: kv_store.create(store_spec(group, config)))
    shape = jax.ShapeDtypeStruct
    view = BlockView(
        pos=shape((1,), jnp.int32),
        bits=shape((1, 1), jnp.uint32),
        blocks=shape((n,), jnp.int32),
        n_blocks=shape((), jnp.int32),
        cell_pos=shape((n, B), jnp.int32),
        cell_seqs=shape((n, B, 1), jnp.uint32),
    )
    q, own = (shape((1, h, D), jnp.float32) for h in (n_q, n_kv))
    how = LayerAttention(group=group, rope=None, implementation="chunked")
    args = TokenQKV(q=q, k=own, v=own), LayerKV(k=store.k[0], v=store.v[0]), view, how
    options = {**(compiler_options() or {}), "xla_dump_to": str(folder)}
    program = jax.jit(attend).lower(*args).compile(options)
    return program, n * n_kv * D * B, store.k[0], folder


def test_cores_share_the_sums_and_nothing_of_the_cache_s_size_is_made(compiled):
    program, n_numbers, *_ = compiled
    text = program.as_text()
    sums = [x for x in text.splitlines() if " fusion(" in x and "f32[8,3,4,256]" in x[:90]]
    sums += [x for x in text.splitlines() if " fusion(" in x and "f32[8,3,16," in x[:90]]
    sums = [x for x in sums if "reduce" in x]
    assert len(sums) >= 2
    if os.cpu_count() != 1:
        assert sum("outer_dimension_partitions" in x for x in sums) >= 2
    made = [x for x in hlo.instructions(text) if not x.inside and x.op != "parameter"]
    assert not [x for x in made if x.size >= n_numbers and x.op in ("copy", "fusion", "convert")]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize("compiled", ["f16", "int8"], indirect=True)
def test_llvm_vectorizes_the_sums(compiled):
    _, n_numbers, keys, folder = compiled
    said = f"{{i64 {n_numbers * jax.tree.leaves(keys)[0].dtype.itemsize}}}"
    kernels = [x for x in folder.glob("*.ir-no-opt.ll") if said in x.read_text()]
    counts = [sum_code.disassembled(x) for x in kernels if "reduce" in x.name]
    print(counts)
    assert counts and not any(sum_code.is_lost(x) for x in counts)

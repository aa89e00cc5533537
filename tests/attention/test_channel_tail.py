"""Keys by channel by the GPU kernel, interpreted, against XLA; what is in the tail among them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import GroupSpec, MaskSpec, RopeSpec, SelfExtend
from kvrt.attention import grouped, rope
from kvrt.attention.pallas import attend as pallas_attend
from kvrt.attention.pallas import gpu
from kvrt.attention.reference import attend as judge
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import BlockView, SeqView
from kvrt.sizes import Extent, StoreSpec
from kvrt.store import kv as kv_store
from scripts._lib import chips
from tests.marks import full, slow

pytestmark = pytest.mark.slow

N_KV, D, B, N_BLOCKS = 2, 32, 64, 5
N = B * N_BLOCKS
ROPE = RopeSpec(n_rot=D, base=100.0)
WINDOW = MaskSpec(kind="window", size=90)


@functools.cache
def cached(type_k, n_written):
    """Cells 0 to n_written of one text: all groups but the newest four are quantized."""
    extent = Extent(n_cells=N, block_size=B)
    sizes = {"n_buffers": 1, "n_kv_heads": N_KV, "head_dim": D, "extent": extent}
    store = kv_store.create(StoreSpec(**sizes, type_k=type_k, type_v="int8", n_seq_max=1))
    write = jax.jit(kv_store.write_kv)
    rng = np.random.default_rng(1)
    for start in range(0, n_written, 32):
        slots = np.where(np.arange(start, start + 32) < n_written, np.arange(start, start + 32), N)
        k, v = rng.standard_normal((2, 32, N_KV, D)).astype(np.float32)
        store = write(store, slots.astype(np.int32), [5 * k], [v])
    return LayerKV(k=store.k[0], v=store.v[0])


def asked(tokens, lists, *, n_written, mask, unrotated, extend=None):
    """Queries of some tokens behind the text, with one list or, where lists are 2, one each."""
    rng = np.random.default_rng(2)
    pos = np.arange(n_written, n_written + tokens, dtype=np.int32)
    at = np.arange(N).reshape(N_BLOCKS, B)
    told = {
        "pos": jnp.asarray(pos),
        "bits": jnp.ones((tokens, 1), jnp.uint32),
        "cell_pos": jnp.asarray(np.where(at < n_written, at, -1), jnp.int32),
        "cell_seqs": jnp.asarray(at[..., None] < n_written, jnp.uint32),
    }
    if lists == 2:  # the second token reads the first blocks alone, none of the tail
        blocks = jnp.asarray([[3, 0, 4, 1, 2]] * tokens, jnp.int32)
        listed = [N_BLOCKS, *[2] * (tokens - 1)]
        blocks = blocks.at[1:, :2].set(jnp.array([1, 0]))
        view = SeqView(blocks=blocks, n_blocks=jnp.asarray(listed, jnp.int32), **told)
    else:
        listed = jnp.asarray([4, 3, 0, 1, 2], jnp.int32)
        view = BlockView(blocks=listed, n_blocks=jnp.int32(N_BLOCKS), **told)
    tables = rope.make(ROPE, view, 512, unrotated=True) if unrotated else None
    group = GroupSpec(layers=(0,), n_kv_heads=N_KV, head_dim=D, rope=ROPE, mask=mask)
    q, k, v = (
        jnp.asarray(rng.standard_normal((tokens, n, D)), jnp.float32) for n in (4, N_KV, N_KV)
    )
    if extend is None:
        return TokenQKV(q=q, k=k, v=v), view, LayerAttention(group=group, rope=tables)
    far = grouped.grouped_tables(ROPE, view, 512, extend, unrotated=unrotated)
    how = LayerAttention(group=group, rope=tables, grouped=far.cells)
    return TokenQKV(q=q, k=k, v=v, grouped=far.tokens(q, k)), view, how


EXTEND = SelfExtend(ga_n=4, ga_w=24, kind="paper")
CASES = {
    "one": dict(tokens=1, lists=1, n_written=N - 7, mask=MaskSpec(), unrotated=False),
    "prompt, unrotated": dict(tokens=5, lists=1, n_written=N - 7, mask=WINDOW, unrotated=True),
    "several": dict(tokens=3, lists=2, n_written=N - 7, mask=MaskSpec(), unrotated=False),
    "all in the tail": dict(tokens=2, lists=1, n_written=60, mask=MaskSpec(), unrotated=True),
    "grouped, rotated": dict(
        tokens=3, lists=2, n_written=N - 7, mask=MaskSpec(), unrotated=False, extend=EXTEND
    ),
}


# Two bits are other shifts of a word, in one list and in several.
OF_TWO_BITS = ("prompt, unrotated", "several")


@pytest.mark.parametrize(
    ("type_k", "name"),
    [("kivi4", name) for name in CASES]
    + [(slow if name in OF_TWO_BITS else full)("kivi2", name) for name in CASES],
)
def test_the_kernel_reads_what_is_quantized_and_the_tail(type_k, name):
    case = CASES[name]
    kv, (qkv, view, how) = cached(type_k, case["n_written"]), asked(**case)
    kernel = gpu.kernel(interpret=True)
    found = jax.jit(functools.partial(pallas_attend.attend, kernel))(qkv, kv, view, how)
    gone = dataclasses.replace(kv.k, group=jnp.full_like(kv.k.group, -1))
    with jax.default_matmul_precision("highest"):  # of both: one program
        wanted = jax.jit(judge)(qkv, kv, view, how)
        hidden = jax.jit(judge)(qkv, dataclasses.replace(kv, k=gone), view, how)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)
    # The control: without the tail it is another result.
    assert np.abs(np.asarray(hidden[0]) - np.asarray(wanted[0])).max() > 1e-2


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_lowers_without_a_gpu(platform):
    case = CASES["prompt, unrotated"]
    args = jax.eval_shape(lambda: (cached.__wrapped__("kivi4", 32), asked(**case)))
    by_kernel = jax.jit(lambda kv, rest: pallas_attend.attend(gpu.kernel(), rest[0], kv, *rest[1:]))
    exported = chips.lowered(by_kernel, args, platform)
    # What is quantized, and the tail.
    assert exported.mlir_module().count(f"stablehlo.custom_call @{chips.GPU_CALL}") == 2

"""Attention over rows in codes: as over the rows that they stand for; turned rows give the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec
from kvrt.attention import BlockView, LayerAttention, LayerKV, SeqView, TokenQKV, attend
from kvrt.attention.step_attention import step_attention
from kvrt.sizes import store_spec
from kvrt.store import codec, hadamard
from kvrt.store import kv as kv_store

H, D, B, N, T = 2, 64, 8, 4, 3
GROUP = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None)


def drawn(seed=0):
    """Queries, keys and values of T tokens, and rows of N * B cells."""
    rng = np.random.default_rng(seed)
    own = [rng.standard_normal((T, h, D)).astype(np.float32) for h in (2 * H, H, H)]
    old = [rng.standard_normal((N * B, H, D)).astype(np.float32) for _ in range(2)]
    return *own, *old


def cells(released=()):
    pos = np.arange(N * B, dtype=np.int32)
    pos[list(released)] = -1
    return pos.reshape(N, B), (pos >= 0).astype(np.uint32).reshape(N, B, 1)


def views(released=()):
    cell_pos, cell_seqs = cells(released)
    pos, bits = np.arange(N * B, N * B + T, dtype=np.int32), np.ones((T, 1), np.uint32)
    both = dict(pos=pos, bits=bits, cell_pos=cell_pos, cell_seqs=cell_seqs)
    blocks = np.arange(N, dtype=np.int32)[::-1]
    table = np.tile(blocks[None], (T, 1))
    return {
        "list": BlockView(**both, blocks=blocks, n_blocks=np.int32(N)),
        "rows": SeqView(**both, blocks=table, n_blocks=np.full(T, N, np.int32)),
    }


jitted_attend, jitted_write = jax.jit(attend), jax.jit(kv_store.write_kv)


def store_of(k, v, type_k, type_v, **options):
    config = CacheConfig(n_ctx=N * B, block_size=B, type_k=type_k, type_v=type_v, **options)
    empty = kv_store.create(store_spec(GROUP, config))
    return jitted_write(empty, np.arange(N * B, dtype=np.int32), [k], [v])


def decoded(store):
    """The store with the rows that codes stand for, as float32."""
    k, v = codec.decode(store.k[0], -2), codec.decode(store.v[0], -1)
    return kv_store.KVStore(k=(k,), v=(v,))


def attended(store, view, implementation, q, k, v):
    how = LayerAttention(group=GROUP, implementation=implementation)
    return jitted_attend(TokenQKV(q=q, k=k, v=v), LayerKV(k=store.k[0], v=store.v[0]), view, how)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("int8", "q8_0"), ("int4", "int2")])
@pytest.mark.parametrize("which", ["list", "rows"])
def test_codes_are_read_as_what_they_stand_for(kinds, which):
    q, k, v, *old = drawn()
    store = store_of(*old, *kinds)
    plain = decoded(store)
    wanted = attended(plain, views()[which], "reference", q, k, v)
    for implementation in ("chunked", "reference"):
        found = attended(store, views()[which], implementation, q, k, v)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)
    # To the bit, where nothing but the form of the rows differs.
    same = attended(plain, views()[which], "chunked", q, k, v)
    np.testing.assert_array_equal(attended(store, views()[which], "chunked", q, k, v)[0], same[0])


@pytest.mark.parametrize("kind", ["q8_0", "int4"])
@pytest.mark.parametrize("which", ["list", "rows"])
def test_released_rows_never_leak(kind, which):
    """Whatever their bytes are, scales that are no numbers included."""
    q, k, v, *old = drawn(1)
    released = [0, 3, 9, *range(16, 24)]
    clean = store_of(*old, kind, kind)

    def spoilt(x, axis):
        index: list = [slice(None)] * 4
        flat = np.array(released)
        index[0], index[axis] = flat // B, flat % B
        bad = (
            np.nan if jnp.issubdtype(x.dtype, jnp.floating) else -1 if x.dtype == jnp.int8 else 255
        )
        x = np.array(x)
        x[tuple(index)] = bad
        return x

    dirty = kv_store.KVStore(
        k=jax.tree.map(lambda x: spoilt(x, 3), clean.k),
        v=jax.tree.map(lambda x: spoilt(x, 2), clean.v),
    )
    view = views(released)[which]
    wanted = attended(clean, view, "chunked", q, k, v)
    for implementation in ("chunked", "reference"):
        out, lse = attended(dirty, view, implementation, q, k, v)
        np.testing.assert_allclose(out, wanted[0], atol=2e-6)
        np.testing.assert_allclose(lse, wanted[1], atol=2e-6)


# --- turned before they are coded -----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_the_matrix_is_orthonormal_and_its_own_inverse(n):
    m = hadamard.matrix(n).astype(np.float64)
    np.testing.assert_allclose(m @ m, np.eye(n), atol=1e-6)
    np.testing.assert_array_equal(m, m.T)
    assert set(np.abs(m * np.sqrt(n)).round(6).ravel()) == {1.0}
    x = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    turned = hadamard.transform(jnp.asarray(x), n)
    np.testing.assert_allclose(turned[:, :, :n], x[:, :, :n] @ m, atol=1e-5)
    np.testing.assert_allclose(hadamard.transform(turned, n), x, atol=5e-6)
    block = hadamard.transform_block(jnp.asarray(x).transpose(1, 2, 0), n)
    np.testing.assert_allclose(block.transpose(2, 0, 1), turned, atol=5e-6)


@pytest.mark.parametrize(
    ("d", "n_k", "n_v"), [(64, 64, 64), (256, 256, 64), (96, 32, 32), (80, 16, 16)]
)
def test_how_many_channels_turn_together(d, n_k, n_v):
    assert (hadamard.size_k(d, True), hadamard.size_v(d, True)) == (n_k, n_v)
    assert (hadamard.size_k(d, False), hadamard.size_v(d, False)) == (0, 0)


def stepped(kinds, on, q, k, v, old):
    """Output of a layer's step over rows that a step before wrote, and the rows it keeps."""
    q, k, v, repeated, *old = jax.device_put([q, k, v, np.repeat(old[0], 2, axis=1), *old])
    size = {"n_ctx": N * B, "block_size": B, "attention": "chunked"}
    config = CacheConfig(**size, type_k=kinds[0], type_v=kinds[1], hadamard=on)
    spec = dataclasses.replace(GROUP, layers=(0,))
    empty = kv_store.create(store_spec(spec, config))
    view = views()["list"]
    nothing = dataclasses.replace(
        view,
        pos=np.arange(N * B, dtype=np.int32),
        bits=np.ones((N * B, 1), np.uint32),
        n_blocks=np.int32(0),
    )
    first = step_attention([empty], [[nothing]], [spec], config, {}, None)
    first(0, repeated, *old)
    slots = np.arange(N * B, dtype=np.int32)
    store = kv_store.write_kv(empty, slots, [first.k_new[0]], [first.v_new[0]])
    step = step_attention([store], [[view]], [spec], config, {}, None)
    return step(0, q, k, v), store


@pytest.mark.slow
def test_turned_rows_attend_as_rows_that_were_not():
    q, k, v, *old = drawn(2)
    exact, _ = stepped(("f32", "f32"), False, q, k, v, old)
    plain, _ = stepped(("int8", "int8"), False, q, k, v, old)
    turned, store = stepped(("int8", "int8"), True, q, k, v, old)
    assert np.abs(turned - exact).max() < 0.03 and np.abs(plain - exact).max() < 0.03
    assert np.abs(turned - plain).max() > 0
    back = hadamard.transform_block(codec.decode(store.k[0], -2)[0], D)
    np.testing.assert_allclose(back.transpose(2, 0, 1), old[0][:B], atol=0.03)
    # Rows of float types are not turned.
    half, store = stepped(("f32", "int8"), True, q, k, v, old)
    np.testing.assert_array_equal(store.k[0][0].transpose(2, 0, 1), old[0][:B])
    assert np.abs(half - exact).max() < 0.03


@pytest.mark.slow
def test_one_great_channel_costs_less_when_it_is_spread():
    q, k, v, *old = drawn(3)
    old[1][:, :, 5] *= 50.0
    exact, _ = stepped(("f32", "f32"), False, q, k, v, old)
    errors = [
        float(np.abs(stepped(("f32", "q8_0"), on, q, k, v, old)[0] - exact)[:, :, 6:].mean())
        for on in (False, True)
    ]
    assert errors[1] < 0.7 * errors[0]

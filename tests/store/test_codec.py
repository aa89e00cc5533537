"""Codes of rows: against NumPy to the bit, and carried with their scales wherever rows go."""

import functools

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt import CacheConfig, GroupSpec
from kvrt.arrays import array_bytes
from kvrt.errors import BadConfig
from kvrt.kv_types import CODECS, FLOAT_DTYPES
from kvrt.sizes import store_spec
from kvrt.store import blocks, codec
from kvrt.store import kv as kv_store
from tests.store import plaincodec
from tests.store.plaincodec import head_bytes

H, D, B, N_CTX = 2, 64, 8, 100
N_ROWS = 104
KINDS = tuple(CODECS)
BOTH = [("int8", "q8_0"), ("int4", "int2"), ("q8_0", "f16")]
MACHINES = [("int4", "int8"), *(pytest.param(types, marks=pytest.mark.slow) for types in BOTH)]
GROUP = GroupSpec(layers=(0, 3), n_kv_heads=H, head_dim=D, rope=None)


def like(name, axis=-1):
    return codec.zeros(name, (1, 1, 1, D) if axis == -1 else (1, 1, D, 1), axis % 4)


@functools.cache
def program(name, axis=-1):
    encode = jax.jit(lambda x: codec.encode(x, like(name, axis), axis))
    return encode, jax.jit(lambda x: codec.decode(x, axis))


def bits(x):
    return np.asarray(x).tobytes()


def drawn(seed, n=40):
    """Rows of many sizes: far from zero, constant, zero, and one channel beyond all others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, H, D)) * 10.0 ** rng.integers(-2, 4, (n, H, 1))
    x[:8] += rng.standard_normal((8, 1, D)) * 1000
    x[8:12, 0], x[9:13, 1, :32] = 0, 7.25
    x[14:20, :, rng.integers(0, D)] *= 100
    return x.astype(np.float32)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**20))
def test_codes_are_those_of_numpy_to_the_bit(name, seed):
    x = drawn(seed)
    encode, decode = program(name)
    found = encode(x)
    codes, scale, low = plaincodec.encoded(x, name)
    assert (bits(found.data), bits(found.scale)) == (bits(codes), bits(scale))
    assert (found.zero_point is None) == (low is None) and (
        low is None or bits(found.zero_point) == bits(low)
    )
    back = decode(found)
    assert bits(back) == bits(plaincodec.decoded(codes, scale, low, name))
    assert bits(decode(encode(back))) == bits(back)


@pytest.mark.parametrize("name", KINDS)
def test_keys_have_the_codes_of_values_on_another_axis(name):
    x = drawn(3)
    encode, decode = program(name, -2)
    found, rowwise = encode(np.moveaxis(x, 0, 2)), program(name)[0](x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(rowwise), strict=True):
        np.testing.assert_array_equal(np.moveaxis(np.asarray(a), 2, 0), b)
    np.testing.assert_array_equal(np.moveaxis(decode(found), 2, 0), program(name)[1](rowwise))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("value", [0, 1e-30, 1e-7, 65504, 7e4, 1e9, 3e38])
def test_finite_rows_never_become_nan(name, value):
    x = np.zeros((4, H, D), np.float32)
    x[0], x[1], x[2, 0, 5], x[3, :, ::2] = value, -value, value, -value
    back = np.asarray(program(name)[1](program(name)[0](x)))
    assert not np.isnan(back).any()
    if value == 0:
        assert not back.any()
    if value == 65504:
        assert np.abs(back - x).max() <= 32
    if value == 3e38 and name == "fp8":
        np.testing.assert_allclose(back, x, rtol=2.0**-15)


def test_q8_0_is_that_of_llama_cpp():
    x = drawn(1, 400).reshape(-1, D)
    # Halves are rounded away from zero: codes 0 to 126 and a half, under a scale of one.
    x = np.concatenate(
        [x, np.append(np.arange(31) * 4 + 0.5, 127.0)[None].repeat(2, 0).reshape(1, D)]
    )
    found = program("q8_0")[0](x.astype(np.float32)[:, None])
    scale = np.asarray(found.scale)[:, 0, :, None].view(np.uint8)
    codes = np.asarray(found.data).reshape(-1, D // 32, 32).view(np.uint8)
    both = np.concatenate([scale, codes], axis=2).reshape(len(x), -1)
    wanted = quants.quantize(x.astype(np.float32), GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(both, wanted)
    back = program("q8_0")[1](found)[:, 0]
    np.testing.assert_array_equal(back, quants.dequantize(wanted, GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("name", KINDS)
def test_errors_are_within_half_a_step(name):
    x = drawn(5)[14:]
    x = x[np.abs(x).max((1, 2)) < 6e4]  # what minima can hold
    found = program(name)[0](x)
    error = np.abs(np.asarray(program(name)[1](found)) - x).reshape(*found.scale.shape, -1)
    step = np.asarray(found.scale, np.float32)[..., None]
    # Minima and scales in half precision move the whole grid a little.
    low = (
        0
        if found.zero_point is None
        else np.abs(np.asarray(found.zero_point, np.float32))[..., None]
    )
    if CODECS[name].floating:  # half a step of three bits, or of the least that they count in
        size = np.abs(x).reshape(error.shape)
        assert (error <= np.maximum(size * 2.0**-4, step * 2.0**-10) * (1 + 2.0**-10)).all()
        return
    assert (error <= step * (0.5 + 2.0**-10 * CODECS[name].top) + low * 2.0**-10).all()


@pytest.mark.parametrize("name", ["q8_0", "int4", "int2"])
def test_heads_that_groups_do_not_fill_are_refused(name):
    with pytest.raises(BadConfig, match="do not fill a head of 48; choose int8, or a float type"):
        codec.zeros(name, (48,), 0)


# --- in a store -----------------------------------------------------------------------------------


def empty(type_k, type_v):
    config = CacheConfig(n_ctx=N_CTX, block_size=B, type_k=type_k, type_v=type_v)
    return kv_store.create(store_spec(GROUP, config))


@pytest.mark.parametrize("types", [*BOTH, ("f32", "int8"), ("bf16", "int4")])
def test_a_store_takes_the_bytes_that_its_types_say(types):
    store = empty(*types)
    assert kv_store.n_cells(store) == N_ROWS
    assert array_bytes(store) == 2 * H * N_ROWS * sum(head_bytes(t, D) for t in types)
    assert array_bytes(store) == sum(x.nbytes for x in jax.tree.leaves(store))
    assert (
        head_bytes("q8_0", 32) == 34
        and head_bytes("int4", 32) == 20
        and head_bytes("int2", 32) == 12
    )


def kept(x, name):
    return plaincodec.coded(x, name) if name in CODECS else x.astype(FLOAT_DTYPES[name])


class Machine:
    """A store and what its rows should be, in the types in which they are kept."""

    def __init__(self, types):
        self.types = types
        self.run = {
            name: jax.jit(f, donate_argnums=0)
            for name, f in {
                "write": kv_store.write_kv,
                "move": kv_store.move_kv,
                "move_blocks": kv_store.move_blocks,
                "clear": kv_store.clear_kv,
                "put": kv_store.put_kv,
                "put_blocks": blocks.put_blocks,
            }.items()
        }
        self.read, self.take = (
            jax.jit(kv_store.read_kv, static_argnames="layer"),
            jax.jit(kv_store.take_kv),
        )
        self.take_blocks = jax.jit(blocks.take_blocks)

    def fill(self, seed):
        self.rng = np.random.default_rng(seed)
        self.store, self.plain = empty(*self.types), np.zeros((2, 2, N_ROWS, H, D), np.float32)
        self.write(np.arange(N_ROWS, dtype=np.int32))

    def write(self, slots):
        x = self.rng.standard_normal((2, 2, len(slots), H, D)).astype(np.float32)
        self.store = self.run["write"](self.store, slots, *map(list, x.copy()))
        real = slots < N_ROWS
        for side, name in enumerate(self.types):
            self.plain[side][:, slots[real]] = kept(x[side], name)[:, real]

    def slots(self, n):
        out = self.rng.permutation(N_ROWS)[:n].astype(np.int32)
        return np.where(self.rng.random(n) < 0.2, N_ROWS + out, out).astype(np.int32)

    def some_writes(self):
        self.write(self.slots(16))

    def moves(self):
        n = int(self.rng.integers(0, 32))
        a, b = self.rng.permutation(N_ROWS)[: 2 * n].reshape(2, n)
        src, dst = (np.full(64, N_ROWS, np.int32) for _ in range(2))
        src[: 2 * n], dst[: 2 * n] = np.stack([a, b], 1).ravel(), np.stack([b, a], 1).ravel()
        self.store = self.run["move"](self.store, src, dst, np.asarray(2 * n, np.int32))
        self.plain[:, :, dst[: 2 * n]] = self.plain[:, :, src[: 2 * n]]

    def merges(self):
        """Cells of blocks are copied to others at once: as a defragmentation does."""
        n = int(self.rng.integers(0, 53))
        src, dst = self.rng.permutation(N_ROWS)[: 2 * n].astype(np.int32).reshape(2, n)
        moves = kv_store.plan_block_moves(src, dst, B)
        for first in range(0, len(moves.src), 13):
            part = kv_store.part_of_moves(moves, first, 13)
            self.store = self.run["move_blocks"](self.store, *part)
        self.plain[:, :, dst] = self.plain[:, :, src]

    def clears(self):
        released = self.rng.random(N_ROWS) < 0.3
        self.store = self.run["clear"](self.store, released.reshape(-1, B))
        self.plain[:, :, released] = 0

    def copies(self):
        """What is taken of some rows is put into others: as sessions do."""
        src, dst = self.rng.permutation(N_ROWS)[:32].astype(np.int32).reshape(2, 16)
        self.store = self.run["put"](self.store, dst, *self.take(self.store, src))
        self.plain[:, :, dst] = self.plain[:, :, src]

    def blocks(self):
        """Whole blocks leave as bytes and come back elsewhere: as tiers do."""
        src, dst = self.rng.permutation(N_ROWS // B)[:4].astype(np.int32).reshape(2, 2)
        data = np.asarray(self.take_blocks(self.store, src))
        assert data.shape[1] == B * 2 * H * sum(head_bytes(t, D) for t in self.types)
        self.store = self.run["put_blocks"](self.store, dst, data)
        by_block = self.plain.reshape(2, 2, N_ROWS // B, B, H, D)
        by_block[:, :, dst] = by_block[:, :, src]

    def check(self):
        everywhere = np.arange(N_ROWS, dtype=np.int32)
        for layer in range(2):
            for found, wanted in zip(
                self.read(self.store, layer, everywhere), self.plain, strict=True
            ):
                np.testing.assert_array_equal(found, wanted[layer])


OPERATIONS = ("some_writes", "moves", "merges", "clears", "copies", "blocks")


@pytest.fixture(scope="module", params=MACHINES)
def machine(request):
    return Machine(request.param)


@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 999), history=st.lists(st.sampled_from(OPERATIONS), max_size=6))
def test_scales_go_where_their_rows_go(machine, seed, history):
    machine.fill(seed)
    machine.check()
    for name in (*history, *OPERATIONS):
        getattr(machine, name)()
    machine.check()

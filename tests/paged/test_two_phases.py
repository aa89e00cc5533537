"""Tiers under real device arrays: what was gathered survives the donation of its pool."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvrt.paged.tiers.host import HostTier
from kvrt.paged.tiers.index import TierIndex
from kvrt.paged.tiers.tiering import Tiering

pytestmark = pytest.mark.slow

N_BLOCKS, SHAPE = 16, (2, 3, 8)  # layers, heads, channels
N_BYTES = 4 * 2 * 3 * 8


@jax.jit
def gather(pool, ids):
    rows = jnp.take(pool, ids, axis=0)
    return lax.bitcast_convert_type(rows, jnp.uint8).reshape(len(ids), N_BYTES)


@partial(jax.jit, donate_argnums=0)
def scatter(pool, ids, rows):
    rows = lax.bitcast_convert_type(rows.reshape(-1, *SHAPE, 4), jnp.float32)
    return pool.at[ids].set(rows, mode="drop")


@partial(jax.jit, donate_argnums=0)
def step(pool):
    return pool * -2.0


class Device:
    """Pads ids to one size, so that one program serves all; padding is beyond the last block."""

    def __init__(self):
        values = np.random.default_rng(0).standard_normal((N_BLOCKS, *SHAPE))
        self.pool = jnp.asarray(values, jnp.float32)

    def gather(self, ids):
        return gather(self.pool, jnp.asarray([*ids, *[0] * (8 - len(ids))], jnp.int32))

    def scatter(self, ids, data):
        padded = np.zeros((8, N_BYTES), np.uint8)
        padded[: len(ids)] = data
        where = jnp.asarray([*ids, *[N_BLOCKS] * (8 - len(ids))], jnp.int32)
        self.pool = scatter(self.pool, where, padded)


def test_what_was_gathered_survives_the_next_step():
    device = Device()
    host = HostTier(TierIndex(8), N_BYTES)
    tiers = Tiering(host, gather=device.gather, scatter=device.scatter)
    before = np.array(device.pool)  # a copy: a view would keep the pool from being donated
    tiers.store(["a", "b", "c"], [3, 5, 9])
    for _ in range(3):
        old = device.pool
        device.pool = step(device.pool)  # the gathered blocks were copied, or this would be them
        assert old.is_deleted()
    tiers.flush()
    device.pool = jnp.zeros_like(device.pool)
    tiers.new_step()
    assert tiers.find(["a", "b", "c"]) == (3, 0)
    tiers.load(["c", "a"], [1, 2])
    after = np.asarray(device.pool)
    assert np.array_equal(after[[1, 2]], before[[9, 3]])
    assert not after[[0, *range(3, N_BLOCKS)]].any()
    tiers.close()

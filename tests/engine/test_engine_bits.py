"""Blocks and cells, hit and miss, alone and forked: equal to the bit, with the programs users get.

Steps of other tokens round otherwise, so what is compared is computed in steps that are cut alike.
"""

import numpy as np
import pytest

from tests.engine.engines import N_BATCH, ask, engine, one

pytestmark = pytest.mark.slow
OPTIMISED = True
KINDS = ["full", "window", "chunked", "recurrent"]


def assert_same(a, b):
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_give_what_cells_give(kind):
    rng = np.random.default_rng(1)
    for i, n in enumerate((8, 24, 36)):
        # Whole blocks, for steps end with them where layers are recurrent.
        tokens = rng.integers(0, 32, n)
        request = ask(i, tokens, 40)
        assert_same(one(engine(kind, "paged"), request), one(engine(kind, "cell"), request))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_gives_what_a_miss_gives(kind):
    at = engine(kind, "paged")
    tokens = np.random.default_rng(2).integers(0, 32, N_BATCH + 3)
    miss = one(at, ask("miss", tokens))
    at.add_request(ask("hit", tokens))
    outs = [x for _ in range(20) if at.has_work for x in at.step()]
    # A whole step of the first, so that what is left of both is computed in steps alike.
    assert outs[0].n_cached == N_BATCH
    assert_same(one(at, ask("again", tokens)), miss)
    other = np.concatenate([tokens[: N_BATCH + 2], [1, 2, 3]])
    found = one(at, ask("other", other))
    assert_same(found, one(at, ask("cold", other, cache=False)))

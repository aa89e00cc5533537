"""Blocks and cells, hit and miss, alone and forked: equal to the bit, with the programs users get.

Steps of other tokens round otherwise, so what is compared is computed in steps that are cut alike.
One kind, of full and of windowed layers, runs by layer on a CPU; the others run whole.
"""

import functools

import numpy as np
import pytest

from kvrt.errors import BadConfig
from tests.serving.engines import N_BATCH, ask, make, one, run

pytestmark = pytest.mark.slow
OPTIMISED = True
# Tokens of a step by kind. Layers of all positions are in both, windows of 9 in those by layer.
KINDS = {"recurrent": N_BATCH, "by layer": 2 * N_BATCH}


@functools.cache
def engine(kind, mode):
    """One that tests share, with the programs of all in its mode."""
    n = KINDS.get(kind, N_BATCH)
    return make(kind, mode, block_size=8, n_ubatch=n, prefix_cache=mode == "paged")


def assert_same(a, b):
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_give_what_cells_give(kind):
    rng = np.random.default_rng(1)
    for i, n in enumerate((8, 24, 40)):
        # Whole blocks, for steps end with them where layers are recurrent.
        tokens = rng.integers(0, 32, n)
        request = ask(i, tokens, 40)
        assert_same(one(engine(kind, "paged"), request), one(engine(kind, "cell"), request))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_gives_what_a_miss_gives(kind):
    at, n = engine(kind, "paged"), KINDS[kind]
    tokens = np.random.default_rng(2).integers(0, 32, n + 3)
    miss = one(at, ask("miss", tokens))
    at.add_request(ask("hit", tokens))
    outs = [x for _ in range(20) if at.has_work for x in at.step()]
    # A whole step of the first, so that what is left of both is computed in steps alike.
    assert outs[0].n_cached == n
    assert_same(one(at, ask("again", tokens)), miss)
    other = np.concatenate([tokens[: n + 2], [1, 2, 3]])
    found = one(at, ask("other", other))
    assert_same(found, one(at, ask("cold", other, cache=False)))


def test_a_hit_within_a_block_gives_what_a_miss_gives():
    at = make("by layer", block_size=8, hash_block_size=2)
    tokens = np.random.default_rng(3).integers(0, 32, 21)
    run(at, [ask("first", tokens)])
    # 20 tokens up to the last boundary of a prompt: two blocks, and half of the third in a copy.
    other = np.concatenate([tokens, [1, 2, 3, 4]])
    at.add_request(ask("hit", other))
    (out,) = at.step()
    assert out.n_cached == 20
    found = list(out.tokens)
    while at.has_work:
        found += [t for out in at.step() for t in out.tokens]
    assert found == one(at, ask("cold", other, cache=False))[0]
    # The block that was copied still says what it said.
    assert one(at, ask("again", tokens))[0] == one(at, ask("anew", tokens, cache=False))[0]


def test_one_kind_runs_by_layer():
    said = {kind: engine(kind, "paged").stats().programs for kind in ("full", "by layer")}
    assert said["full"].startswith("whole") and said["by layer"].startswith("by_layer")


def test_hits_within_blocks_are_refused_where_none_can_be():
    with pytest.raises(BadConfig, match="in cell mode a hit ends at any token"):
        make("full", "cell", hash_block_size=2)
    with pytest.raises(BadConfig, match="hash blocks of 3 tokens"):
        make("full", hash_block_size=3)

"""Where the sequences of an engine in cells lie: together, whoever grows beside them."""

import numpy as np
import pytest

from tests.serving.engines import B, ask, drawn, make, served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpy_device")]


def n_blocks_read(engine):
    """By running sample, blocks that its next token reads, and the fewest that hold its tokens."""
    (group,) = engine.space._host.groups
    return [
        (len(group.visible_blocks({s.seq_id: s.n_computed})), -(-s.n_computed // B))
        for s in engine.running
    ]


def assert_homes_are_of_those_who_run(engine):
    for group in engine.space._host.complete:
        homes = group._homes
        assert set(np.flatnonzero(homes >= 0)) <= {s.seq_id for s in engine.running}
        assert homes.max() <= group.extent.n_cells


@pytest.mark.parametrize("prefixes", [True, False])
def test_sequences_that_grow_together_read_their_own_blocks(prefixes):
    engine = make("full", "cell", prefix_cache=prefixes)
    rng = np.random.default_rng(0)

    def check():
        assert all(n == least for n, least in n_blocks_read(engine))
        assert_homes_are_of_those_who_run(engine)

    asked = [ask(i, [i, *x], 20) for i, x in enumerate(drawn(rng, 4))]  # nothing is shared
    served(engine, asked, after_step=check)


def test_kept_sequences_make_way_for_whole_blocks_and_no_more_than_that():
    engine, rng = make("full", "cell", n_ctx=400), np.random.default_rng(1)
    excess, n_kept = [], []

    def check():
        # The first step of a prompt may end within a block that others have left.
        excess.extend(n - least for n, least in n_blocks_read(engine))
        (use,) = engine.space.pool_use()
        n_kept.append(use.n_cached)
        assert_homes_are_of_those_who_run(engine)

    for i in range(12):
        asked = [ask(f"{i}-{j}", x, 24) for j, x in enumerate(drawn(rng, 4, 20))]
        served(engine, asked, after_step=check)
    assert engine.stats().pools[0].n_evicted > 400
    assert np.mean(excess) < 0.5 and max(excess) <= 2
    # Four that run have up to 252 of the cells.
    assert np.mean(n_kept[len(n_kept) // 2 :]) > 100


def test_a_cache_fills_to_its_last_cell():
    engine, most = make("full", "cell", n_ctx=40, prefix_cache=False), []

    def check():
        most.append(engine.usage)

    served(engine, [ask(i, np.arange(9) + i, 8) for i in range(4)], after_step=check)
    stats = engine.stats()
    # They want 64 cells in all, and somebody goes only when the last of 40 is taken.
    assert max(most) == 1 and stats.sequences["preempted"] and stats.finished["length"] == 4

"""Blocks that sharing saves, from what the pool holds, against their arithmetic.

The figures are 53 % of blocks by a shared system prompt, and 55 % of memory, so that 2.2 times as
many sequences fit, by sharing among samples. Sizes are chosen so that the arithmetic gives them;
what is tested is that the pool holds what the arithmetic says, and not a block more.
"""

import numpy as np
import pytest

from tests.serving.engines import B, ask, make

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpy_device")]

N = 4


def held_after(asked, n_steps):
    """Blocks that the pool holds, and those that the sequences which run have in their tables."""
    engine = make(n_ctx=512, n_ubatch=128)
    for request in asked:
        engine.add_request(request)
        if request is asked[0]:  # others find what it computed
            engine.step()
    for _ in range(n_steps):
        engine.step()
    assert len(engine.running) == N
    (pool,) = engine.stats().pools
    return pool.n_units - pool.n_free, sum(-(-s.capacity // B) for s in engine.running)


def drawn(seed, n):
    return np.random.default_rng(seed).integers(0, 32, n).tolist()


def test_a_shared_system_prompt_saves_53_percent_of_blocks():
    """5 blocks of a system prompt, 2 of one's own: 4 x 7 = 28 in the tables, 5 + 4 x 2 = 13."""
    system = drawn(0, 5 * B)
    held, named = held_after([ask(i, [*system, i, *drawn(i, B)], B) for i in range(N)], 1)
    assert (held, named) == (5 + N * 2, N * (5 + 2))
    assert 1 - held / named == pytest.approx(0.53, abs=0.01)


def test_samples_of_one_prompt_save_55_percent_so_that_2_2_times_as_many_fit():
    """11 blocks of a prompt, 4 sampled: 4 x 15 = 60 in the tables, 11 + 4 x 4 = 27."""
    held, named = held_after([ask("a", drawn(1, 11 * B), 4 * B + 2, n=N)], 3 * B + 2)
    assert (held, named) == (11 + N * 4, N * (11 + 4))
    assert 1 - held / named == pytest.approx(0.55, abs=0.001)
    assert named / held == pytest.approx(2.2, abs=0.05)

"""A token that nobody needed for a hundred steps, and somebody needs then."""

import numpy as np
import pytest
from flax import nnx

from kvrt import CacheConfig, DoubleSparsity, GroupSpec, Runtime
from kvrt.policies.scored import SparseWindow
from tests.toys import RowModel

NEEDED, ASKS, OTHERS = 0, 1, range(2, 12)
D, N_READ = 8, 32
TEXT = [int(x) for x in np.random.default_rng(1).choice(OTHERS, 120)]
LABELS = DoubleSparsity(
    n_cells=N_READ,
    n_recent=N_READ // 2 - 1,
    n_sink=0,
    n_dense=0,
    channels=(((0, 1, 2, 3),),),
    by_cell=True,
)
MODES = {
    "dense": {},
    "label": {"select": LABELS},
    "sparse": {"policy": SparseWindow(budget=N_READ, interval=1)},
    "refresh": {"policy": SparseWindow(budget=200, n_read=N_READ, refresh_every=8)},
}


def model():
    """Token 1 asks for token 0; all others look at each other alone."""
    found = RowModel(
        n_vocab=16,
        n_heads=1,
        n_kv_heads=1,
        group=GroupSpec(layers=(0,), n_kv_heads=1, head_dim=D, rope=None),
        head_dim=D,
    )
    rng = np.random.default_rng(0)
    q, k = np.zeros((2, 16, 1, D), np.float32)
    k[NEEDED, 0, 0] = q[ASKS, 0, 0] = 8.0
    for i in OTHERS:
        q[i, 0, 1:4] = k[i, 0, 1:4] = 4.0 + rng.random(3)
    for name, x in (("q", q), ("k", k)):
        setattr(found, name, nnx.Param(x))
    return found


def opened(mode):
    rest = MODES[mode]
    config = CacheConfig(n_ctx=256, block_size=16, n_ubatch=128, select=rest.get("select"))
    return Runtime(model(), config, policy=rest.get("policy"))


def answer(mode, n_text=100):
    """What the asking token sees."""
    runtime = opened(mode)
    runtime.append([TEXT[0], NEEDED, *TEXT[1:n_text]])
    return np.asarray(runtime.append([ASKS]))[0]


@pytest.mark.slow
def test_by_labels_it_comes_back():
    np.testing.assert_allclose(answer("label"), answer("dense"), atol=1e-3)


@pytest.mark.parametrize("n_more", range(8))
def test_by_queries_that_read_all_it_comes_back_when_one_of_them_asks(n_more):
    """One that asks between two of them reads what the last one chose, and has it not."""
    n_text = 103 + n_more
    differs = np.abs(answer("refresh", n_text) - answer("dense", n_text)).max()
    assert (differs < 1e-3) == (n_more == 0)


def test_it_stays_until_the_next_query_that_reads_all():
    """The first that asks reads all; one that asks again, after others, reads what it chose."""
    text, found = [TEXT[0], NEEDED, *TEXT[1:103], ASKS, *TEXT[:3]], []
    for mode in ("dense", "refresh"):
        runtime = opened(mode)
        runtime.append(text)
        found.append(np.asarray(runtime.append([ASKS]))[0])
    np.testing.assert_allclose(*found, atol=1e-3)


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="what is not chosen gets no attention, so it scores nothing")
def test_by_attention_of_what_was_chosen_it_does_not():
    np.testing.assert_allclose(answer("sparse"), answer("dense"), atol=1e-3)


def test_the_question_is_a_question():
    """The control: without the needed token the answer is another."""
    dense, runtime = answer("dense"), opened("dense")
    runtime.append(TEXT[:100])
    assert abs(np.asarray(runtime.append([ASKS]))[0] - dense).max() > 0.5

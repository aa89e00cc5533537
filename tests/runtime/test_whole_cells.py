"""Whole cells evicted by attention of all heads and layers, against float64 in NumPy."""

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime, session
from kvrt.errors import BadConfig, CannotRewind, UsageError
from tests.policies.plainscored import rotation, softmax
from tests.toys import RowModel, ToyLm, tables

pytestmark = pytest.mark.slow

D, N, N_LAYERS = 8, 40, 2
TEXT = np.random.default_rng(3).integers(0, 32, N).tolist()
CONFIG = CacheConfig(n_ctx=96, n_ubatch=32, block_size=16, n_seq_max=2)
SIZES = {"window": 6, "n_sink": 2}


def rows(model, text, pos):
    """Queries and keys with RoPE, and values; float64."""
    q, k, v = (x.astype(np.float64)[text] for x in tables(model))
    at = np.array([rotation(p, D) for p in pos])
    return *(np.einsum("tde,the->thd", at, x) for x in (q, k)), v


def probabilities(model, text, pos, t):
    """Of each query head of token t, over the tokens up to it. `[Q, t + 1]`"""
    q, k, _ = rows(model, text, pos)
    group = q.shape[1] // k.shape[1]
    return np.array([softmax(k[: t + 1, h // group] @ q[t, h] / D**0.5) for h in range(q.shape[1])])


def stays(model, text, pos, n_keep, *, window, n_sink):
    """Positions that stay; the layers of the model see the same keys."""
    worth = np.zeros(len(text))
    for t in range(len(text) - window, len(text)):
        worth[: t + 1] += probabilities(model, text, pos, t).sum(0)
    worth[:n_sink] = worth[-window:] = np.inf
    return sorted(np.asarray(pos)[np.argsort(-worth, kind="stable")[:n_keep]].tolist())


def test_the_same_tokens_stay_as_by_hand_and_nothing_else_changes():
    """A second eviction looks at what the first left; another sequence keeps what was shared."""
    model = RowModel(masks=[MaskSpec()] * (N_LAYERS - 1))
    runtime = Runtime(model, CONFIG)
    runtime.prefill(TEXT[:32])
    runtime.seq_cp(0, 1)
    kept = stays(model, TEXT[:32], range(32), 18, **SIZES)
    gone = runtime.evict_cells(0, 18, **SIZES)
    assert runtime.token_history()[0].tolist() == kept == sorted({*range(32)} - {*gone.tolist()})
    assert kept != [0, 1, *range(16, 32)], "the newest alone: a control"
    assert runtime.token_history(1)[0].tolist() == list(range(32))
    runtime.append(TEXT[32:])
    text, pos = [TEXT[p] for p in kept] + TEXT[32:], [*kept, *range(32, N)]
    v = rows(model, text, pos)[2]
    p = probabilities(model, text, pos, len(text) - 1)
    wanted = N_LAYERS * np.array([p[h] @ v[:, h // (len(p) // v.shape[1])] for h in range(len(p))])
    np.testing.assert_allclose(runtime.last_logits(0)[0], wanted.reshape(-1), atol=2e-5)
    runtime.evict_cells(0, 15, **SIZES)
    again = stays(model, text, pos, 15, **SIZES)
    assert runtime.token_history()[0].tolist() == again
    assert (runtime.n_exact() or 0) <= kept.index(next(p for i, p in enumerate(kept) if p != i))
    runtime.seq_rm(1)
    assert runtime.stats().cells_used == 15


def test_a_session_goes_on_with_what_was_left(tmp_path):
    runtime, other = (Runtime(ToyLm(), CONFIG) for _ in range(2))
    runtime.prefill(TEXT[:32])
    runtime.evict_cells(0, 20, **SIZES)
    session.save(tmp_path / "a.kv", runtime.snapshot())
    other.restore(session.read(session.open_session(tmp_path / "a.kv")))
    np.testing.assert_array_equal(runtime.append([5]), other.append([5]))
    programs = {key[0] for key in other.programs.compiled()}
    assert "tapped_step" not in programs and runtime.evict_cells(0, 60).size == 0


def test_what_does_not_fit_is_refused_in_one_line():
    windows = ToyLm(masks=[MaskSpec(), MaskSpec(kind="window", size=8)])
    blocks = Runtime(ToyLm(), CONFIG)
    blocks.to_blocks(0)
    cases = [
        (Runtime(windows, CONFIG), {}, CannotRewind, "set swa_full, or take a policy"),
        (blocks, {}, BadConfig, "use to_cells first"),
        (Runtime(ToyLm(), CONFIG), {"window": 30}, UsageError, "keep 35 or more, or protect"),
    ]
    for config in (
        CacheConfig(n_ctx=96, n_ubatch=32, rope="read"),
        CacheConfig(n_ctx=96, n_ubatch=32, block_size=32, type_k="kivi4"),
    ):
        cases.append((Runtime(ToyLm(head_dim=32), config), {}, BadConfig, "keys"))
    for runtime, sizes, kind, says in cases:
        with pytest.raises(kind, match=says) as found:
            runtime.evict_cells(0, 30, **{"window": 6, **sizes})
        assert "\n" not in str(found.value)

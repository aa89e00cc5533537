"""KVzip: which tokens a repetition of the prompt keeps, against float64; what follows; refusals."""

import dataclasses

import numpy as np
import pytest

from kvrt import CacheConfig, Engine, MaskSpec, Request, Runtime
from kvrt.errors import BadRequest, UsageError
from kvrt.policies.scored import H2O, KVzip
from kvrt.runtime.compress import compress_prompt
from tests.policies.plainscored import rotation, softmax
from tests.toys import RowModel, ToyLm, tables

N, D, N_KV = 60, 8, 2
RNG = np.random.default_rng(5)
PROMPT, ASK = RNG.integers(0, 32, N).tolist(), [7, 3, 9]
POLICY = KVzip(budget=20, interval=8, n_sink=2, n_recent=1)
CONFIG = CacheConfig(n_ctx=128, n_ubatch=32, block_size=16)


def greatest(model, text, n_prompt):
    """The most attention that each kv head's queries behind the prompt give each of its tokens."""
    q, k, _ = (x.astype(np.float64)[text] for x in tables(model))
    at = np.array([rotation(p, D) for p in range(len(text))])
    q, k = (np.einsum("tde,the->thd", at, x) for x in (q, k))
    out, group = np.zeros((N_KV, n_prompt)), q.shape[1] // N_KV
    for head in range(q.shape[1]):
        for t in range(n_prompt, len(text)):
            p = softmax(k[: t + 1, head // group] @ q[t, head] / D**0.5)
            out[head // group] = np.maximum(out[head // group], p[:n_prompt])
    return out


def stays(scores, policy):
    """Positions that each head keeps: sinks, the newest, and the greatest scores."""
    worth = scores.copy()
    worth[:, : policy.n_sink] = worth[:, len(worth[0]) - policy.recent :] = np.inf
    return [sorted(np.argsort(-x, kind="stable")[: policy.budget].tolist()) for x in worth]


def test_it_keeps_what_the_repetition_attends_to():
    model = RowModel()
    runtime = Runtime(model, CONFIG, policy=POLICY)
    done = []
    found = compress_prompt(runtime, PROMPT, ask=ASK, progress=lambda *n: done.append(n))
    n_all = 2 * N + len(ASK)
    assert done[-1] == (n_all, n_all) and (N, n_all) in done and sorted(done) == done
    kept = [x.tolist() for x in runtime.kept_positions()[0]]
    assert kept == stays(greatest(model, PROMPT + ASK + PROMPT, N), POLICY)
    assert kept != stays(greatest(model, PROMPT + ASK + PROMPT[::-1], N), POLICY), "a control"
    assert found.n_evaluated == 2 * N + len(ASK)
    assert runtime.seq_pos_max() == N - 1 and runtime.token_history()[1].tolist() == PROMPT
    # Slots of the prompt twice and of what asks, and one that stays free.
    one = (found.transient_bytes - 4) / (2 * N + len(ASK) + 1)
    assert runtime.stats().cache_bytes == 28 * one + 4


@pytest.mark.slow
def test_logits_and_what_follows_are_those_of_the_tokens_that_stay():
    """Windows beside it are those of the prompt, and not of its repetition."""
    model = ToyLm(masks=[MaskSpec(), MaskSpec(kind="window", size=8)])
    runtime, plain = Runtime(model, CONFIG, policy=POLICY), Runtime(model, CONFIG)
    text = [x % 64 for x in PROMPT]
    found = compress_prompt(runtime, text, ask=ASK)
    np.testing.assert_allclose(found.logits, plain.append(text)[0], atol=2e-4)
    whole = Runtime(model, CONFIG, policy=dataclasses.replace(POLICY, budget=60))
    compress_prompt(whole, text, ask=ASK)
    a, b, c = (np.asarray(x.append([5])) for x in (whole, plain, runtime))
    np.testing.assert_allclose(a, b, atol=2e-4)
    assert abs(c - b).max() > 1e-3, "tokens that went are missed"


def test_what_does_not_fit_is_refused_in_one_line():
    runtime = Runtime(RowModel(), CONFIG, policy=H2O(budget=20, interval=8))
    with pytest.raises(UsageError, match="H2O repeats nothing; leave ask out"):
        compress_prompt(runtime, PROMPT, ask=ASK)
    engine = Engine(RowModel(), CONFIG, policy=POLICY)
    with pytest.raises(BadRequest, match="a prompt of more than 27 tokens repeated"):
        engine.add_request(Request(id="long", tokens=tuple(PROMPT[:28]), n_predict=1))
    engine.add_request(Request(id="short", tokens=tuple(PROMPT[:27]), n_predict=1))

"""An engine whose requests keep tokens by score: every request has what it has alone."""

import numpy as np
import pytest

from kvrt import CacheConfig, Engine, EngineConfig, Runtime
from kvrt.options.serving import TierConfig
from kvrt.policies.scored import H2O, SnapKV
from tests.serving.engines import served_texts
from tests.toys import HybridLm, ToyLm

pytestmark = pytest.mark.slow

MODEL = ToyLm()
CLOSED = H2O(budget=20, interval=8, close_up=True)
SHARED = SnapKV(budget=20, interval=8, window=5, head_share=0.5)
RNG = np.random.default_rng(3)
BEGIN = [int(x) for x in RNG.integers(0, 64, 48)]
TEXTS = [BEGIN + [int(x) for x in RNG.integers(0, 64, n)] for n in (3, 11, 30)] + [
    [int(x) for x in RNG.integers(0, 64, n)] for n in (5, 40)
]
CONFIG = CacheConfig(n_ctx=512, n_ubatch=8, n_seq_max=3, block_size=16)
N_NEW = 24


def alone(policy, text, model=MODEL):
    runtime = Runtime(model, CacheConfig(n_ctx=128, n_ubatch=8), policy=policy)
    runtime.append(text)
    return [t.id for t in runtime.generate(N_NEW)]


def served(engine, texts):
    return served_texts(engine, texts, N_NEW)


@pytest.mark.parametrize("policy", [CLOSED, SHARED], ids=["closed", "shared"])
def test_every_request_has_the_text_it_has_alone(policy):
    """The matrix has other policies, in both modes; no shared budget, and no keys by place."""
    engine = Engine(MODEL, CONFIG, EngineConfig(mode="paged"), policy=policy)
    wanted = [alone(policy, text) for text in TEXTS]
    # The second round finds what the first one has left, and gives the same.
    assert served(engine, TEXTS) == wanted
    assert served(engine, TEXTS[::-1]) == wanted[::-1]
    assert engine.stats().prefix["hit"] > 0


def test_states_of_recurrent_layers_lie_beside_what_a_policy_keeps():
    """Of other shapes, under one index a sequence; what a tier has of both is found again."""
    model, policy = HybridLm(), H2O(budget=20, interval=8)
    tiers = TierConfig(host_bytes=1 << 22, always=True)
    engine = Engine(model, CONFIG, EngineConfig(mode="paged", tiers=tiers), policy=policy)
    texts = [[token % 32 for token in text] for text in TEXTS[:3]]
    wanted = [alone(policy, text, model) for text in texts]
    assert served(engine, texts) == wanted
    assert served(engine, texts) == wanted
    assert engine.stats().prefix["hit"] > 0
    engine.close()

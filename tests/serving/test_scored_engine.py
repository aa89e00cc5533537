"""An engine whose requests keep tokens by score: every request has what it has alone."""

import dataclasses

import numpy as np
import pytest

from kvrt import CacheConfig, Engine, EngineConfig, Request, Runtime
from kvrt.errors import UsageError
from kvrt.options.serving import TierConfig
from kvrt.policies.scored import H2O, KVzip, SnapKV
from kvrt.runtime.compress import compress_prompt, compressed_prefix
from kvrt.serving.sessions.private_prefix import PrivatePrefix
from tests.marks import full
from tests.serving import engines
from tests.serving.engines import served_texts
from tests.toys import HybridLm, ToyLm

pytestmark = pytest.mark.slow

MODEL = ToyLm()
CLOSED = H2O(budget=20, interval=8, close_up=True)
SNAPKV = SnapKV(budget=20, interval=8, window=5)
SHARED = dataclasses.replace(SNAPKV, head_share=0.5)
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


@pytest.mark.parametrize(
    ("mode", "n"), [("cell", 45), ("paged", 32), full("cell", 50), full("paged", 48)]
)
@pytest.mark.parametrize("policy", [SNAPKV, KVzip(budget=20, interval=8, n_recent=2)])
def test_a_prompt_that_is_compressed_once_gives_what_it_gives_a_runtime(policy, mode, n):
    """Two requests side by side, one of two samples; what each has is for it alone."""
    ask, texts = [7, 3] * policy.reads_whole, [TEXTS[2], TEXTS[0]]
    config = dataclasses.replace(CONFIG, n_seq_max=4)
    engine = Engine(MODEL, config, EngineConfig(mode=mode), policy=policy)
    wanted = []
    for text in texts:
        runtime = Runtime(MODEL, CONFIG, policy=policy)
        compress_prompt(runtime, text[:n], ask=ask)
        runtime.append(text[n:])
        wanted.append([t.id for t in runtime.generate(N_NEW)])
    prefixes = [
        PrivatePrefix(
            tokens=tuple(text[:n]),
            read=lambda text=text: compressed_prefix(engine, text[:n], ask=ask)[0],
        )
        for text in texts
    ]
    asked = [
        Request(id=str(i), tokens=tuple(text), n_predict=N_NEW, private_prefix=prefix, n=1 + i)
        for i, (text, prefix) in enumerate(zip(texts, prefixes, strict=True))
    ]
    found = engines.served(engine, asked)
    assert found == {("0", 0): wanted[0], ("1", 0): wanted[1], ("1", 1): wanted[1]}
    assert [len(x) for x in found.values()] == [N_NEW] * 3
    if not policy.reads_whole:
        assert served(engine, texts) == [alone(policy, text) for text in texts] != wanted
        # A session for all that begin so, under a salt: computed in parts it would be another.
        engine.load(compressed_prefix(engine, texts[0][:n])[0], salt=b"once")
        salted = dataclasses.replace(asked[0], private_prefix=None, salt=b"once")
        assert engines.served(engine, [salted]) == {("0", 0): wanted[0]}


def test_blocks_take_whole_blocks_of_a_compressed_prompt():
    engine = Engine(MODEL, CONFIG, EngineConfig(mode="paged"), policy=SNAPKV)
    text = tuple(TEXTS[2])
    prefix = PrivatePrefix(tokens=text[:45], read=lambda: compressed_prefix(engine, text[:45])[0])
    engine.add_request(Request(id="a", tokens=text, n_predict=1, private_prefix=prefix))
    (out,) = engine.step()
    assert "cannot be used" in out.error and "another multiple of 16" in out.error
    with pytest.raises(UsageError, match="27 tokens fit the slots of 28; append them"):
        compressed_prefix(engine, text[:27])

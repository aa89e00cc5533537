"""The first layers of a model draft in an Engine: what it gives without drafts, in both modes."""

import contextlib
import functools

import numpy as np
import pytest

from kvrt import CacheConfig, Engine, LayerSkip, Sampling, Speculation
from kvrt.errors import BadConfig
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from tests.numpy_device.device import installed
from tests.serving.engines import MODELS, N_BATCH, B, ask, drawn, make, served
from tests.serving.soundspace import assert_sound
from tests.serving.test_engine_drafts import SAMPLED, never_backs_off, texts_of
from tests.toys import ToyLm

pytestmark = pytest.mark.slow

N_DRAFT = 3
SPEC = Speculation(drafter=LayerSkip(exit_layer=1), n_draft=N_DRAFT)
# Also equal: full, chunked, sinks, latent and ropes, and each of these in the other mode.
KINDS = [
    ("rolling", "cell"),
    ("window", "paged"),
    ("retention", "cell"),
    ("retention", "paged"),
]


def pair(kind, mode, in_numpy=installed, **options):
    """An engine whose first layers draft, and one without drafts, in NumPy where it can be."""
    options = {"n_seq_max": 2, "n_ubatch": 8} | options  # few programs
    drafted = make(kind, mode, speculation=SPEC, **options)
    with in_numpy():
        return drafted, make(kind, mode, **options)


def check_same(both, requests, each=lambda out: None):
    drafted, plain = both
    found = served(plain, requests)
    after = functools.partial(assert_sound, drafted)
    assert served(drafted, requests, each, after_step=after) == found
    assert {k[0] for k in drafted.programs.compiled()} >= {"layer_skip"}
    return found


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_text_is_that_without_drafts(kind, mode, monkeypatch):
    """Several requests a step, some without drafts, refused at every index, and hits on those."""
    never_backs_off(monkeypatch)
    rng, refused = np.random.default_rng(3), set()
    both = pair(kind, mode, programs="whole")
    drafts = both[0]._steps._drafts
    ran = drafts.ran

    def noted(plan, n_sampled):
        refused.update(n_sampled[s] - 1 for s, x in plan.drafts.items() if n_sampled[s] <= len(x))
        ran(plan, n_sampled)

    monkeypatch.setattr(drafts, "ran", noted)
    prompts = drawn(rng, 7, 3, 20)
    requests = [ask(i, x, int(rng.integers(8, 40)), drafts=i != 2) for i, x in enumerate(prompts)]
    whole = texts_of(requests, check_same(both, requests))
    cached = []
    again = [ask(f"b{i}", [*x[: len(x) - i], 7], 12) for i, x in enumerate(whole[:-4:-1])]
    check_same(both, again, lambda out: cached.append(out.n_cached))
    stats = both[0].stats()
    assert max(cached) > 0 and {0, 1} <= refused <= set(range(N_DRAFT))
    assert 0 < stats.drafts["accepted"] < stats.drafts["drafted"]
    assert stats.tokens["sampled"] == both[1].stats().tokens["sampled"]
    assert stats.n_steps < both[1].stats().n_steps


def test_samples_penalties_and_stop_ids_are_those_of_single_steps(monkeypatch):
    """Nothing behind a stop id is sampled, though the first layers may draft beyond it."""
    never_backs_off(monkeypatch)
    both = pair("full", "paged", contextlib.nullcontext)  # NumPy's random numbers are others
    (text,) = served(both[1], [ask("x", [1, 2, 3], 20)]).values()
    requests = [
        ask("a", [1, 2, 3, 4, 5], 16, sampling=SAMPLED, n=2),
        ask("b", [1, 2, 3], 20, stop_ids=(31, text[12])),
        ask("c", [4, 4, 4], 14, sampling=Sampling(repeat_penalty=1.5, repeat_last_n=12)),
    ]
    found = check_same(both, requests)
    assert found["b", 0] == text[: text.index(text[12]) + 1]
    assert both[0].stats().drafts["accepted"] > 0


class SilentBehind(ToyLm):
    """Its second layer adds nothing, so that the exit behind the first one says what it says."""

    def __init__(self):
        super().__init__()
        qkv = self.qkv[1]
        width = qkv.shape[1] * self.n_kv_heads // (self.n_heads + 2 * self.n_kv_heads)
        qkv[...] = qkv[...].at[:, -width:].set(0.0)


def test_what_the_other_layers_add_nothing_to_is_drafted_rightly():
    """A draft sees those before it, in blocks that its round begins; then all of them stay.

    The other layers go on from what the first ones made of it, so that else the text would differ.
    """
    config = CacheConfig(n_ctx=256, n_seq_max=2, block_size=B, n_ubatch=8)
    spec = Speculation(drafter=LayerSkip(exit_layer=1), n_draft=7)
    drafted = Engine(SilentBehind(), config, EngineConfig(speculation=spec))
    with installed():
        plain = Engine(SilentBehind(), config, EngineConfig())
    request = ask("a", [3, 1, 4, 1, 5], 40)
    assert served(drafted, [request]) == served(plain, [request])
    assert drafted.stats().drafts == {"rounds": 5, "drafted": 34, "accepted": 34}


def test_policies_and_an_int8_cache(monkeypatch):
    never_backs_off(monkeypatch)
    rules = Rules(n_batch=8, n_ctx_seq=32)
    both = pair("full", "cell", rules=rules, type_k="int8", type_v="int8")
    policies = [ContextShift(n_keep=3), AttentionSinks(n_sink=2, n_window=20, n_drop=8)]
    check_same(both, [ask(i, [5, i, 7], 50, policy=p) for i, p in enumerate(policies)])
    assert both[0].stats().drops == both[1].stats().drops
    assert both[0].stats().drops["tokens"] > 0 < both[0].stats().drafts["accepted"]


@pytest.mark.parametrize(
    ("kind", "exit_layer", "message"),
    [
        ("recurrent", 1, "HybridLm cannot be run in parts"),
        ("shared", 1, "reads the keys and values of layer 0"),
    ],
)
def test_what_the_first_layers_cannot_draft_for_is_refused_at_construction(
    kind, exit_layer, message
):
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=B, n_ubatch=N_BATCH)
    spec = Speculation(drafter=LayerSkip(exit_layer=exit_layer), n_draft=N_DRAFT)
    with pytest.raises(BadConfig, match=message) as caught:
        Engine(MODELS[kind](), config, EngineConfig(speculation=spec))
    assert "\n" not in str(caught.value)

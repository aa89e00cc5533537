"""An engine whose requests read some cells: every request has the text that it has alone."""

import dataclasses
import functools

import numpy as np
import pytest

from kvrt import (
    AttentionSinks,
    CacheConfig,
    DoubleSparsity,
    Engine,
    EngineConfig,
    PromptLookup,
    Quest,
    Runtime,
    Speculation,
)
from kvrt.attention.select import labels
from kvrt.errors import BadConfig, CacheFull
from kvrt.options.serving import Rules
from kvrt.program.labels.arrays import label_plan
from kvrt.serving.request import Request
from tests.numpy_device.device import installed
from tests.serving import engines
from tests.serving.engines import MODELS, WINDOWS, served_texts
from tests.sharedlm import SharedLm
from tests.toys import ToyLm

MODEL = ToyLm()
SIZES = {"n_cells": 32, "n_sink": 0, "n_recent": 1, "n_dense": 1}
SELECTS = {
    "quest": Quest(**SIZES),
    "double_sparsity": DoubleSparsity(**SIZES, channels=(((0, 3, 8, 11),) * 2,) * 2, by_cell=True),
}
MODES = [("paged", "quest"), ("cell", "double_sparsity")]
RNG = np.random.default_rng(3)
BEGIN = [int(x) for x in RNG.integers(0, 64, 48)]
# A runtime reads each in a step of 64 tokens.
TEXTS = [BEGIN + [int(x) for x in RNG.integers(0, 64, n)] for n in (3, 13)]
TEXTS += [[int(x) for x in RNG.integers(0, 64, n)] for n in (35, 49)]
N_NEW = 24


def config_of(select, **changed):
    sizes = {"n_ctx": 512, "n_ubatch": 8, "n_seq_max": 3, "block_size": 16}
    return CacheConfig(**sizes | changed, select=select)


@functools.cache
def runtime_of(name):
    sizes = {"n_ctx": 128, "n_ubatch": 128, "n_seq_max": 1}
    with installed():  # what reads all
        return Runtime(MODEL, config_of(SELECTS.get(name), **sizes))


def alone(name, text):
    """Its text in a runtime that reads the prompt in one step."""
    runtime = runtime_of(name)
    runtime.clear()
    runtime.append(text)
    return [t.id for t in runtime.generate(N_NEW)]


def served(engine, texts):
    return served_texts(engine, texts, N_NEW)


def check_labels(device):
    """Labels of all cells that hold a token are what their keys give, after a step has run."""
    if program := device.labels.pending(device.cache):
        device.cache = dataclasses.replace(device.cache, labels=device.programs.run(program))
    found = device.cache.labels
    plan, cache = label_plan(device.layout, device.spec.config), device.cache
    for i, (kv, cells) in enumerate(zip(cache.stores, cache.cells, strict=True)):
        n = device.layout.stores[i].extent.n_blocks
        pos = np.asarray(cells.pos).reshape(n, -1)
        blocks = np.arange(n, dtype=np.int32), np.asarray(n, np.int32)
        want = labels.rebuild(plan, i, found[i], kv, pos, blocks)
        held = pos.reshape(-1, 16).max(1) >= 0
        at = held if isinstance(plan.select, Quest) else np.repeat(held, 16)
        for got, new in zip(found[i], want, strict=True):
            if got is not None:
                np.testing.assert_allclose(got[:, :, at], new[:, :, at], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), MODES)
def test_every_request_has_the_text_it_has_alone(mode, name):
    select = SELECTS[name]
    wanted = [alone(name, text) for text in TEXTS]
    assert wanted != [alone("dense", text) for text in TEXTS], "else nothing is read sparsely"
    engine = Engine(MODEL, config_of(select), EngineConfig(mode=mode))
    # The second round finds what the first one has left, and gives the same.
    assert served(engine, TEXTS) == wanted
    assert served(engine, TEXTS[::-1]) == wanted[::-1]
    check_labels(engine.device)
    assert engine.stats().prefix["hit"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), MODES)
def test_nobody_finds_what_was_sampled(mode, name):
    """A prompt that goes on where another's answer did has the text that it has alone."""
    engine = Engine(MODEL, config_of(SELECTS[name]), EngineConfig(mode=mode))
    (first,) = served(engine, [TEXTS[0]])
    longer = [*TEXTS[0], *first, 7, 8, 9]
    assert served(engine, [longer]) == [alone(name, longer)]
    assert engine.stats().prefix["hit"] <= len(TEXTS[0])


@pytest.mark.slow
def test_too_little_room_for_all_makes_them_wait_and_changes_no_text():
    """Nobody is preempted: a prompt with the tokens that were sampled would read all."""
    engine = Engine(MODEL, config_of(SELECTS["quest"], n_ctx=192), EngineConfig())
    assert served(engine, TEXTS) == [alone("quest", text) for text in TEXTS]


@pytest.mark.slow
def test_how_steps_divide_a_prompt_changes_nothing():
    """Not even where its last token is alone in a step: it reads all."""
    engine = Engine(MODEL, config_of(SELECTS["quest"]), EngineConfig(rules=Rules(n_batch=5)))
    assert len(TEXTS[0]) % 5 == 1
    assert served(engine, [TEXTS[0]]) == [alone("quest", TEXTS[0])]


@pytest.mark.slow
def test_a_policy_moves_keys_and_labels_follow():
    select, policy = SELECTS["quest"], AttentionSinks(n_window=60, n_sink=4, n_drop=20)
    rules = Rules(n_batch=8, n_ctx_seq=64)
    engine = Engine(MODEL, config_of(select), EngineConfig(rules=rules), policy=policy)
    found = served(engine, TEXTS[3:4] * 2)
    assert found[0] == found[1]
    check_labels(engine.device)


@pytest.mark.slow
def test_samples_and_forks_share_what_was_read():
    engine = Engine(MODEL, config_of(SELECTS["quest"]), EngineConfig())
    engine.add_request(Request(id="a", tokens=tuple(TEXTS[1]), n_predict=N_NEW, n=2))
    found: dict = {}
    while engine.has_work:
        if len(found.get(("a", 0), ())) == 5 and ("b", 0) not in found:
            found["b", 0] = list(found["a", 0])
            engine.fork("a", "b")
        for out in engine.step():
            found.setdefault((out.id, out.sample), []).extend(out.tokens)
    assert list(found.values()) == [alone("quest", TEXTS[1])] * 3


@pytest.mark.slow
def test_a_fork_without_room_is_refused_for_its_text_would_change():
    engine = Engine(MODEL, config_of(SELECTS["quest"]), EngineConfig())
    for name in "acd":
        engine.add_request(Request(id=name, tokens=tuple(TEXTS[1]), n_predict=60))
    sampled = set()
    while len(sampled) < 3:
        sampled |= {out.id for out in engine.step() if out.tokens}
    with pytest.raises(CacheFull, match="reads some cells"):
        engine.fork("a", "b")


def test_what_an_engine_cannot_read_sparsely_is_refused_when_it_is_made():
    quest = config_of(SELECTS["quest"])
    drafts = EngineConfig(speculation=Speculation(drafter=PromptLookup(), n_draft=3))
    shared = SharedLm((0, 1, 0, 1), masks=[WINDOWS[1], WINDOWS[0]] * 2)
    refused = [
        (MODEL, drafts, "leave one of them out"),
        (MODEL, EngineConfig(mode="cell"), "use mode='paged', or DoubleSparsity"),
        (shared, EngineConfig(), "in blocks this model's layers share arrays"),
    ]
    for model, options, says in refused:
        with pytest.raises(BadConfig, match=says) as found:
            Engine(model, quest, options)
        assert "\n" not in str(found.value)


@pytest.mark.slow
def test_what_a_prompt_left_is_found_at_its_checkpoints():
    """A state moves on with what was sampled, which read some cells; its checkpoints stay."""
    model, many = MODELS["recurrent"](), {"n_dense": 0, "channels": (((0, 3),),) * 3}
    select = dataclasses.replace(SELECTS["double_sparsity"], **many)
    begin = [x % 32 for x in BEGIN]
    config = config_of(select, n_checkpoints=24, n_seq_max=1)
    engine = Engine(model, config, EngineConfig(mode="cell"))
    served(engine, [begin])
    asked, texts = Request(id="a", tokens=(*begin, 5, 6), n_predict=N_NEW), []
    for salt, n_found in ((b"another", 0), (b"", len(begin))):
        texts += engines.served(engine, [dataclasses.replace(asked, salt=salt)]).values()
        assert engine.stats().prefix["hit"] == n_found
    assert texts[0] == texts[1]

"""Chunks in the prefix cache of an Engine and its tiers, under one budget: found there again."""

import dataclasses

import numpy as np
import pytest

from kvrt import BlendSpec, CacheConfig, Engine, EngineConfig, Request, Rules, Runtime, TierConfig
from kvrt.errors import SessionMismatch, UsageError
from tests.toys import ToyLm

pytestmark = pytest.mark.slow

B, LEAD = 4, [1]
CHUNKS = [list(range(5, 26)), list(range(30, 47))]  # of 22 and 18 tokens with the lead
CONFIG = CacheConfig(n_ctx=64, n_seq_max=3, n_ubatch=16, block_size=B)


def runtime_of(model):
    return Runtime(model, dataclasses.replace(CONFIG, n_ctx=128, block_size=32))


def engine_of(model):
    tiers = TierConfig(host_bytes=1 << 20, always=True)
    return Engine(model, CONFIG, EngineConfig(rules=Rules(n_batch=16), tiers=tiers))


def run(engine, tokens, name="a"):
    """Serves one request; how much of it was found."""
    engine.add_request(Request(id=name, tokens=tuple(tokens), n_predict=2, salt=name.encode()))
    n_cached = [out.n_cached for _ in range(99) if engine.has_work for out in engine.step()]
    return n_cached[0]


def settle(engine):
    engine.tiers.flush()
    engine.space.begin_step()


def test_a_chunk_that_left_the_device_is_found_in_the_tiers_and_its_rest_computed(monkeypatch):
    model = ToyLm(n_layers=4)
    at, rng = runtime_of(model), np.random.default_rng(0)
    whole = [at.chunk(x, LEAD) for x in CHUNKS]
    wanted = at.blend(whole, [9, 8], BlendSpec(ratio=0.2))
    at.clear()
    with engine_of(model) as engine:
        for chunk in whole:
            engine.load(chunk.snapshot)
        settle(engine)
        for i in range(3):  # other texts have the device
            run(engine, rng.integers(0, 32, 55).tolist(), f"filler {i}")
        settle(engine)
        before = engine.stats().tiers["host"].counts["loaded"]
        saved = [engine.save([*LEAD, *x]) for x in CHUNKS]
        assert engine.stats().tiers["host"].counts["loaded"] - before == 5 + 4
        # And by whoever begins so.
        engine.add_request(Request(id="b", tokens=(*LEAD, *CHUNKS[0], 3), n_predict=1))
        assert engine.step()[0].n_cached == 20
        with pytest.raises(UsageError, match="has nothing of these"):
            engine.save([*CHUNKS[0]])
    n_appended, append = [], at._stepper.append
    monkeypatch.setattr(
        at._stepper, "append", lambda ids, *told: (n_appended.append(len(ids)), append(ids, *told))
    )
    again = [at.chunk(x, LEAD, begun) for x, begun in zip(CHUNKS, saved, strict=True)]
    assert n_appended == [22 - 20, 18 - 16]
    found = at.blend(again, [9, 8], BlendSpec(ratio=0.2))
    assert found.computed.tolist() == wanted.computed.tolist()
    np.testing.assert_allclose(found.logits, wanted.logits, atol=2e-3, rtol=0)


def test_what_was_not_computed_alone_is_computed_anew():
    """Behind other text, moved, or approximate: none of it is taken for the chunk's."""
    model = ToyLm(n_layers=4)
    at = runtime_of(model)
    wanted = at.chunk(CHUNKS[0], LEAD)
    at.append([*LEAD, 50, 51, *CHUNKS[0]])
    at.seq_rm(0, 1, 3)
    at.seq_add(0, 3, None, -2)
    moved = at.snapshot()
    at.clear()
    again = at.chunk(CHUNKS[0], LEAD, moved)
    at.blend([wanted, at.chunk(CHUNKS[1], LEAD)], [9], BlendSpec(ratio=0.0))
    blended = at.snapshot()
    at.clear()
    both = [*CHUNKS[0], *CHUNKS[1]]
    longer = at.chunk(both, LEAD, blended), at.chunk(both, LEAD)
    for a, b in ((again, wanted), longer):
        for x, y in zip(a.snapshot.groups[0].blocks, b.snapshot.groups[0].blocks, strict=True):
            np.testing.assert_allclose(x.k, y.k, atol=1e-4)
            np.testing.assert_allclose(x.v, y.v, atol=1e-4)
    other = dataclasses.replace(moved, fingerprint=moved.fingerprint | {"n_vocab": 3})
    with pytest.raises(SessionMismatch):
        at.chunk(CHUNKS[0], LEAD, other)
    assert at.seq_pos_max(0) == -1

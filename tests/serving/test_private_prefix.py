"""A request that brings its first keys and values along goes on as a Runtime that has them."""

import dataclasses
import functools

import numpy as np
import pytest

from kvrt import (
    BlendSpec,
    CacheConfig,
    ContextShift,
    Engine,
    EngineConfig,
    PrivatePrefix,
    Request,
    Rules,
    Runtime,
    Sampling,
)
from kvrt.errors import BadRequest, BadSession, UsageError
from tests.toys import ToyLm

pytestmark = pytest.mark.slow

B, LEAD, N_PREDICT = 4, (1,), 9
CHUNKS = [list(range(5, 26)), list(range(30, 47))]
HELD = [*LEAD, *CHUNKS[0], *CHUNKS[1]]
SUFFIX = [9, 8, 7, 6, 9]
MODES = ["cell", "paged"]


@functools.cache
def model():
    return ToyLm(n_layers=3)


@functools.cache
def runtime():
    return Runtime(model(), CacheConfig(n_ctx=128, n_seq_max=4, n_ubatch=8, block_size=32))


@functools.cache
def blend():
    """A blend's snapshot, one token beyond its chunks."""
    at = runtime()
    at.clear()
    chunks = [at.chunk(x, LEAD) for x in CHUNKS]
    at.blend(chunks, SUFFIX[:1], BlendSpec(ratio=0.2))
    return at.snapshot()


@functools.cache
def engine(mode, n_ctx=128, n_rows=4):
    config = CacheConfig(n_ctx=n_ctx, n_seq_max=n_rows, n_ubatch=8, block_size=B)
    rules = Rules(n_batch=8)
    return Engine(model(), config, EngineConfig(mode=mode, prefix_cache=True, rules=rules))


def ask(name, suffix=SUFFIX, read=blend, **fields):
    fields.setdefault("private_prefix", PrivatePrefix(tokens=tuple(HELD), read=read))
    fields.setdefault("sampling", Sampling(temp=0.0))
    return Request(id=name, tokens=(*HELD, *suffix), n_predict=N_PREDICT, **fields)


def serve(at, *requests):
    for request in requests:
        at.add_request(request)
    out, ends = {}, {}
    while at.has_work:
        for o in at.step():
            out.setdefault((o.id, o.sample), []).extend(o.tokens)
            if o.finish_reason:
                ends[o.id, o.sample] = o
    return out, ends


def alone(suffix, n_shared):
    """What a Runtime says that has the blend's first n_shared tokens."""
    at = runtime()
    at.clear()
    at.restore(blend(), {0: 0})
    at.seq_rm(0, n_shared, None)
    at.append([*HELD[n_shared:], *suffix])
    return [t.id for t in at.generate(N_PREDICT, sampling=Sampling(temp=0.0))]


@pytest.mark.parametrize("mode", MODES)
def test_it_goes_on_from_what_it_brings(mode):
    n_shared = len(HELD) if mode == "cell" else len(HELD) // B * B
    others = [3, 2, 9, 9, 1]
    plain = ask("plain", private_prefix=None)
    asked = [ask("a"), ask("b", others, n=2), plain, ask("c", priority=1)]
    out, ends = serve(engine(mode), *asked)
    assert out["a", 0] == out["c", 0] == alone(SUFFIX, n_shared)
    assert out["b", 0] == out["b", 1] == alone(others, n_shared)
    assert ends["a", 0].n_cached == ends["b", 0].n_cached == n_shared
    # Nobody else finds it: the plain one computed all, and is what a Runtime computes.
    assert out["plain", 0] == alone(SUFFIX, 0) and ends["plain", 0].n_cached == 0
    assert out["plain", 0] != out["a", 0]
    again, ends = serve(engine(mode), dataclasses.replace(plain, id="again"))
    assert again["again", 0] == out["plain", 0] and ends["again", 0].n_cached > n_shared


@pytest.mark.parametrize("mode", MODES)
def test_it_is_read_again_where_it_was_evicted(mode):
    """Room for one and a half: the later ones wait, or are preempted and come back."""
    n_shared = len(HELD) if mode == "cell" else len(HELD) // B * B
    n_read = []

    def read():
        n_read.append(1)
        return blend()

    at = engine(mode, n_ctx=88, n_rows=3)
    rng = np.random.default_rng(3)
    suffixes = [rng.integers(0, 32, 4).tolist() for _ in range(5)]
    out, ends = serve(at, *[ask(str(i), x, read=read) for i, x in enumerate(suffixes)])
    for i, x in enumerate(suffixes):
        assert ends[str(i), 0].error is None
        assert out[str(i), 0] == alone(x, n_shared), i
    assert len(n_read) >= len(suffixes)


def test_what_cannot_be_read_ends_the_request_alone():
    def damaged():
        raise BadSession("a.kv: block 3 is damaged")

    def short():
        at = runtime()
        at.clear()
        at.append(HELD[:9])
        return at.snapshot()

    out, ends = serve(
        engine("paged"), ask("bad", read=damaged), ask("short", read=short), ask("ok")
    )
    assert ends["bad", 0].error == (
        "request 'bad': its private prefix cannot be used: a.kv: block 3 is damaged"
    )
    assert "the session has 9 of its 39 tokens" in ends["short", 0].error
    assert ends["ok", 0].error is None and len(out["ok", 0]) == N_PREDICT


def test_refused():
    prefix = PrivatePrefix(tokens=tuple(HELD), read=blend)
    for wrong, fields, said in [
        (BadRequest, {"tokens": tuple(HELD)}, "has 39 tokens, and must have 1 to 38"),
        (BadRequest, {"tokens": (2, *HELD)}, "does not begin with the tokens"),
        (BadRequest, {"tokens": (*HELD, 2), "cache": False}, "give one"),
    ]:
        with pytest.raises(wrong, match=said):
            Request(id="a", n_predict=2, private_prefix=prefix, **fields)
    config = CacheConfig(n_ctx=128, n_seq_max=4, n_ubatch=16, block_size=B)
    with pytest.raises(BadRequest, match="there is none; set prefix_cache"):
        Engine(model(), config, EngineConfig(mode="cell", prefix_cache=False)).add_request(ask("a"))
    moving = ask("a", policy=ContextShift(n_keep=2), quota=44)
    with pytest.raises(BadRequest, match="its policy or SelfExtend would move it"):
        engine("cell").add_request(moving)
    at = engine("paged")
    at.add_request(ask("a"))
    at.step()
    for call in (at.save, at.pin):
        with pytest.raises(UsageError, match="may be approximate, so nothing of it is for others"):
            call("a")
    serve(at)

"""Pinned prefixes: found whatever others need, gone like all else once they are unpinned."""

import functools

import numpy as np
import pytest

from kvrt.errors import BadConfig, BadRequest, CacheFull, UsageError
from kvrt.options.serving import TierConfig
from kvrt.serving import prometheus
from tests.marks import slow
from tests.serving.engines import B, alone, ask, make, served
from tests.serving.soundspace import assert_sound

pytestmark = pytest.mark.usefixtures("numpy_device")

MODES = ("cell", "paged")


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 32, n).tolist()


def serve(engine, *asked):
    """Tokens of requests, and how many of their prompts were found."""
    n_cached = {}
    sound = functools.partial(assert_sound, engine)
    got = served(engine, asked, lambda out: n_cached.setdefault(out.id, out.n_cached), sound)
    return got, n_cached


def fill(engine, n=6, first=100):
    """Other texts, one after another, as long as the cache is."""
    for i in range(n):
        serve(engine, ask(f"filler {i}", prompt(40, first + i), 3, salt=b"x"))


def is_found(engine, kind, tokens, name="again", **told):
    request = ask(name, [*tokens, 5, 7], 4, **told)
    got, n_cached = serve(engine, request)
    assert got[name, 0] == alone(kind, request)
    return n_cached[name]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("full", "cell"),
        slow("full", "paged"),
        slow("recurrent", "paged"),
        slow("window", "paged"),
        slow("chunked", "cell"),
        slow("states", "cell"),
    ],
)
def test_a_pinned_prefix_is_found_until_it_is_unpinned(kind, mode):
    """A whole text of 24 tokens; what others compute takes the place of all else."""
    engine, text = make(kind, mode, n_ctx=120), prompt(24)
    serve(engine, ask("a", text, 1))
    pin = engine.pin(text)
    assert pin.tokens == tuple(text) and pin.salt == b""
    assert (engine.stats().n_pins == 1 and any(p.n_pinned for p in engine.stats().pools)) or (
        kind == "states" and mode == "cell"
    )
    fill(engine)
    assert is_found(engine, kind, text) == 24
    engine.unpin(pin)
    assert engine.stats().n_pins == 0 and not any(p.n_pinned for p in engine.stats().pools)
    fill(engine, first=200)
    assert is_found(engine, kind, text) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_what_is_pinned_is_room_that_others_do_not_have(mode):
    engine, text = make("full", mode, n_ctx=96), prompt(40)
    serve(engine, ask("a", text, 1))
    n_free = engine.stats().pools[0].n_free
    pins = [engine.pin(text), engine.pin(text[:20])]  # each its own
    pool = engine.stats().pools[0]
    n = 40 if mode == "cell" else 40 // B
    assert pool.n_pinned == n == n_free - pool.n_free and engine.stats().n_pins == 2
    engine.add_request(ask("b", prompt(70, 1), 3))
    for _ in range(20):
        outputs = engine.step()
        if outputs:
            break
    (out,) = outputs
    assert "no other request runs; shorten it, unpin a prefix, or raise n_ctx" in out.error
    engine.unpin(pins[0])
    assert engine.stats().pools[0].n_pinned == n // 2
    engine.unpin(pins[1])
    request = ask("b", prompt(70, 1), 3)
    assert serve(engine, request)[0]["b", 0] == alone("full", request)


@pytest.mark.slow
def test_a_running_request_is_pinned_as_far_as_it_has_come():
    engine, text = make(), prompt(18)
    engine.add_request(ask("a", text, 30, salt=b"mine"))
    for _ in range(4):
        engine.step()
    pin = engine.pin("a")
    engine.cancel("a")
    engine.step()
    assert pin.salt == b"mine" and len(pin.tokens) >= 18 // B * B
    fill(engine)
    assert is_found(engine, "full", text, salt=b"mine") >= 16
    assert is_found(engine, "full", text, name="other") == 0


@pytest.mark.slow
def test_a_prefix_that_a_tier_has_is_loaded_and_pinned():
    engine, text = make(tiers=TierConfig(host_bytes=1 << 20, always=True), n_ctx=64), prompt(24)
    serve(engine, ask("a", text, 1))
    fill(engine)
    engine.tiers.flush()
    pin = engine.pin(text)
    assert pin.tokens == tuple(text) and engine.stats().tiers["host"].counts["loaded"]
    engine.unpin(pin)
    engine.close()


def test_what_cannot_be_pinned_is_said_in_one_line():
    engine, text = make(), prompt(24)
    nothing = "the prefix cache has nothing of these 24 tokens to pin: they were not computed here"
    with pytest.raises(UsageError, match=nothing):
        engine.pin(text)
    serve(engine, ask("a", text, 1))
    with pytest.raises(UsageError, match=nothing):
        engine.pin(text, salt=b"another's")
    with pytest.raises(BadRequest, match="'a', sample 0, is not being served; give its tokens"):
        engine.pin("a")
    pin = engine.pin(text)
    assert "kvrt_pins 1.0" in prometheus.exposition(engine.stats())
    engine.unpin(pin)
    with pytest.raises(UsageError, match="a prefix of 24 tokens is not pinned here; it was unpinn"):
        engine.unpin(pin)
    engine = make("full", prefix_cache=False)
    with pytest.raises(BadConfig, match="of the prefix cache, and there is none; set prefix_cache"):
        engine.pin(text)


def test_a_pin_takes_no_room_that_is_reserved():
    engine, text = make("full", n_ctx=80), prompt(24)
    serve(engine, ask("a", text, 1))
    engine.add_request(ask("b", prompt(5, 1), 70, reserve=74))
    engine.step()
    with pytest.raises(CacheFull, match="free and not reserved; wait for a request to end"):
        engine.pin(text)
    assert not engine.stats().n_pins


KEPT = {"n_checkpoints": 4, "checkpoint_interval": 16, "n_ubatch": 16}


@pytest.mark.parametrize("kind", [slow("recurrent"), slow("window"), slow("states")])
def test_a_pin_in_cells_keeps_what_only_a_checkpoint_has(kind):
    """One sequence runs at a time, so that windows and states of what is kept go at once."""
    engine, text = make(kind, "cell", n_seq_max=1, n_ctx=120, **KEPT), prompt(24)
    serve(engine, ask("a", text, 1), ask("b", prompt(30, 1), 1))
    pin = engine.pin([*text[:20], 9, 9, 9])  # not to its end: to the checkpoint before it
    # Of a window all is still there.
    n = 20 if kind == "window" else 16
    assert pin.tokens == tuple(text[:n])
    for first in (100, 200):
        fill(engine, 10, first=first)
        assert_sound(engine)
    assert is_found(engine, kind, text[:20]) == n
    engine.unpin(pin)
    for i in range(70):  # more than are kept at all
        serve(engine, ask(f"more {i}", prompt(9, 300 + i), 1, salt=b"x"))
    assert is_found(engine, kind, text[:20], name="gone") == 0

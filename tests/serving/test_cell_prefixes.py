"""Prefix hits in cell mode: at any token, of who runs or has ended, and nothing else changes."""

import functools

import jax
import numpy as np
import pytest

from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from tests.serving import engines
from tests.serving.engines import N_ROWS, alone, ask, make
from tests.serving.soundspace import assert_sound

pytestmark = pytest.mark.usefixtures("numpy_device")


def served(engine, asked, *, sound=True):
    """Tokens by request and sample, and the tokens that the first step found of each."""
    n_cached = {}

    def note(out):
        n_cached.setdefault(out.id, out.n_cached)

    check = functools.partial(assert_sound, engine) if sound else lambda: None
    return engines.served(engine, asked, note, check), n_cached


def drawn(seed, n):
    return np.random.default_rng(seed).integers(0, 32, n).tolist()


def n_common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


@pytest.mark.slow
def test_a_hit_ends_at_any_token():
    """Every hit is the longest that a list of all texts has, by salt, but for the last token."""
    engine, rng, held = make("full", "cell", n_ctx=512), np.random.default_rng(0), []
    for i in range(24):
        start = held[int(rng.integers(len(held)))][1] if held and i % 4 else []
        tokens = [
            *start[: int(rng.integers(0, len(start) + 1))],
            *drawn(i, int(rng.integers(1, 7))),
        ]
        salt, cache = b"s" * int(rng.integers(2)), bool(rng.integers(4))
        found, n_cached = served(engine, [ask(i, tokens, 3, salt=salt, cache=cache)])
        same = [n_common(text, tokens) for s, text in held if s == salt]
        assert n_cached[str(i)] == (min(max([0, *same]), len(tokens) - 1) if cache else 0)
        assert found[str(i), 0] == alone("full", ask(i, tokens, 3))
        held.append((salt, [*tokens, *found[str(i), 0][:-1]]))
    stats = engine.stats()
    assert stats.prefix["hit"] > 30 and stats.hit_rate > 0
    (pool,) = stats.pools
    assert pool.n_cached and pool.n_free == pool.n_units and not pool.n_evicted


@pytest.mark.slow
def test_who_runs_is_found_as_well():
    engine, start = make("full", "cell", n_ubatch=16), drawn(1, 12)
    engine.add_request(ask("first", [*start, 1], 8))
    engine.step()
    engine.add_request(ask("second", [*start, 2], 4))
    (of_pool,) = engine.space._arrays._cells.values()
    before = np.count_nonzero(of_pool.cells.pos >= 0)
    engine.step()
    # A token of each, and nothing was copied.
    assert np.count_nonzero(of_pool.cells.pos >= 0) == before + 2
    tokens, n_cached = served(engine, [])
    assert n_cached["second"] == 12
    assert tokens["second", 0] == alone("full", ask("second", [*start, 2], 4))[1:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "window", "recurrent", "states"])
def test_a_second_turn_resumes_wherever_layers_let_it(kind):
    """Windows and states are those of the end of a turn; a prompt that differs earlier misses."""
    engine, first = make(kind, "cell"), drawn(2, 30)
    out = served(engine, [ask("first", first)])[0]["first", 0]
    turn = ask("second", [*first, *out, 5, 6, 7])
    tokens, n_cached = served(engine, [turn])
    assert n_cached["second"] == 35
    assert tokens["second", 0] == alone(kind, turn)
    other = ask("other", [*first[:20], 3, 4])
    tokens, n_cached = served(engine, [other])
    if kind != "window":  # whose cells may still be there
        assert n_cached["other"] == (20 if kind == "full" else 0)
    assert tokens["other", 0] == alone(kind, other)


def histories(rng, n, *, policies=("default",)):
    """Requests that share beginnings, some with samples, salts and policies."""
    starts = [drawn(i, k) for i, k in enumerate((3, 14, 22))]
    for i in range(n):
        start = starts[int(rng.integers(3))]
        yield ask(
            i,
            [*start, *rng.integers(0, 32, rng.integers(1, 8))],
            int(rng.integers(1, 12)),
            n=int(rng.choice([1, 1, 3])),
            salt=b"s" * int(rng.integers(2)),
            policy=policies[int(rng.integers(len(policies)))],
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "window", "recurrent"])
def test_the_same_tokens_with_and_without_under_pressure(kind):
    """Room for a third of what is asked: requests are preempted, what is kept goes."""
    asked = list(histories(np.random.default_rng(3), 24))
    rules = Rules(n_batch=8, n_chunk=6, admit="chunk", by_prefix=True)
    found = {}
    for prefix_cache in (True, False):
        engine = make(kind, "cell", rules=rules, n_ctx=48, prefix_cache=prefix_cache)
        found[prefix_cache] = served(engine, asked, sound=prefix_cache)[0]
        stats = engine.stats()
        assert (stats.prefix["hit"] > 0) == prefix_cache
        if kind == "full":
            assert stats.sequences["preempted"]
            assert (stats.pools[0].n_evicted > 0) == prefix_cache
    assert found[True] == found[False]


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
def test_what_is_shared_is_neither_moved_nor_written(rope):
    """Keys and values of what was kept stay, bit for bit, beside requests that drop and move."""
    rules = Rules(n_batch=8, n_ctx_seq=40)
    engine = make("full", "cell", rules=rules, n_ctx=256, rope=rope)
    start = drawn(4, 20)
    served(engine, [ask("first", start, 4)])
    before = engine.save(start)
    policies = (ContextShift(n_keep=9), AttentionSinks(n_sink=6, n_window=20))
    asked = [ask(f"p{i}", [*start, i], 60, policy=p, n=2) for i, p in enumerate(policies)]
    _, n_cached = served(engine, asked)
    assert list(n_cached.values()) == [9, 6]
    after = engine.save(start)
    for a, b in zip(before.groups[0].blocks, after.groups[0].blocks, strict=True):
        for x, y in zip(*map(jax.tree.leaves, ((a.k, a.v), (b.k, b.v))), strict=True):
            np.testing.assert_array_equal(x, y)
    # What they moved is not found again, nor what they computed behind it.
    _, n_cached = served(engine, [ask("again", asked[0].tokens, 2)])
    assert n_cached["again"] == 20


def test_without_it_nothing_is_kept():
    engine = make("full", "cell", prefix_cache=False)
    for name in "ab":
        _, n_cached = served(engine, [ask(name, drawn(7, 9))], sound=False)
        assert n_cached[name] == 0
    assert len(engine.space._free) == N_ROWS and not engine.space.usage

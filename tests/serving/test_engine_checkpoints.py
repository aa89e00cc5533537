"""Context checkpoints of an engine: hits end at them, in cells and in blocks; all else is alike."""

import dataclasses
import functools

import numpy as np
import pytest

from kvrt import Runtime, session
from kvrt.errors import BadConfig, BadRequest
from kvrt.options.serving import Rules
from tests.serving import engines
from tests.serving.engines import alone, ask, make
from tests.serving.soundspace import assert_sound

pytestmark = pytest.mark.usefixtures("numpy_device")

MODES = ["cell", "paged"]
KEPT = {"n_checkpoints": 8, "checkpoint_interval": 16}
FIRST = np.random.default_rng(7).integers(0, 32, 60).tolist()


def served(engine, asked):
    """Tokens by request and sample, and the tokens that were cached of each when it began."""
    n_cached = {}
    sound = functools.partial(assert_sound, engine)
    tokens = engines.served(engine, asked, lambda x: n_cached.setdefault(x.id, x.n_cached), sound)
    return tokens, n_cached


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, kind",
    [
        ("cell", "recurrent"),
        ("paged", "recurrent"),
        ("cell", "window"),
        ("paged", "window"),
        ("cell", "states"),
        ("cell", "chunked"),
    ],
)
def test_a_prompt_that_ends_otherwise_resumes_at_the_checkpoint_before_it(mode, kind):
    engine = make(kind, mode, **KEPT)
    found = served(engine, [ask("first", FIRST)])[0]
    assert found["first", 0] == alone(kind, ask("first", FIRST))
    for n, n_least in ((50, 48), (40, 32), (59, 48), (17, 16), (9, 0)):
        other = ask(f"other-{n}", [*FIRST[:n], 3, 4])
        found, n_cached = served(engine, [other])
        assert n_least <= n_cached[other.id] <= n, (n, n_cached)
        assert found[other.id, 0] == alone(kind, other)
    kept = engine.stats().checkpoints
    assert kept.n >= 3 and kept.n_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_whose_next_token_sees_nothing_is_not_saved(mode, tmp_path):
    """Chunks of 8: at a multiple of them a new chunk begins, and in blocks all of them are such."""
    every = {"checkpoint_interval": 12} if mode == "cell" else {}
    engine = make("chunked", mode, n_checkpoints=8, **every)
    served(engine, [ask("first", FIRST)])
    session.save(tmp_path / "x.kv", engine.save(FIRST))
    taken = session.read(tmp_path / "x.kv")
    assert bool(taken.checkpoints) == (mode == "cell")
    assert all(c.pos % 8 for c in taken.checkpoints)
    assert make("chunked", mode, n_checkpoints=8, **every).load(taken)[0] >= 56


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_border_of_a_prompt_is_kept(mode):
    config = {"n_checkpoints": 8, "checkpoint_interval": 0}
    engine = make("recurrent", mode, **config)
    served(engine, [ask("first", FIRST, borders=(21, 60))])
    n = 21 if mode == "cell" else 20
    found, n_cached = served(engine, [ask("other", [*FIRST[:30], 3])])
    assert n_cached["other"] == n
    assert found["other", 0] == alone("recurrent", ask("other", [*FIRST[:30], 3]))
    longer = ask("longer", [*FIRST, 3, 4])
    assert served(engine, [longer])[1]["longer"] == 60


@pytest.mark.slow
def test_kept_sequences_without_room_for_their_windows_keep_their_checkpoints():
    """One sequence at a time: what is kept of others are cells of full layers, and checkpoints."""
    engine = make("recurrent", "cell", n_seq_max=1, **KEPT | {"n_checkpoints": 24})
    others = [np.random.default_rng(i).integers(0, 32, 40).tolist() for i in range(3)]
    for i, tokens in enumerate([FIRST, *others]):
        served(engine, [ask(f"first-{i}", tokens)])
    for i, tokens in enumerate([FIRST, *others]):
        again = ask(f"again-{i}", [*tokens[:35], 1, 2])
        found, n_cached = served(engine, [again])
        assert n_cached[again.id] == 32
        assert found[again.id, 0] == alone("recurrent", again)


@pytest.mark.slow
@pytest.mark.parametrize("mode, kind", [("cell", "recurrent"), ("paged", "window")])
def test_the_same_tokens_with_and_without_under_pressure(mode, kind):
    """Requests share beginnings, run beside each other, and are preempted."""
    rng = np.random.default_rng(5)
    asked = []
    for i in range(16):
        tokens = [*FIRST[: int(rng.integers(1, 40))], *rng.integers(0, 32, rng.integers(1, 9))]
        n, salt = int(rng.choice([1, 1, 2])), b"s" * int(rng.integers(2))
        borders = (int(rng.integers(1, len(tokens) + 1)),)
        more = dict(n=n, salt=salt, borders=borders)
        asked.append(ask(i, tokens, int(rng.integers(1, 12)), **more))
    rules = Rules(n_batch=16, n_chunk=12, admit="chunk")
    found = []
    for kept in ({}, KEPT, KEPT | {"checkpoint_bytes": 60_000}):
        engine = make(kind, mode, rules=rules, n_ctx=96, n_ubatch=16, **kept)
        found.append(served(engine, asked)[0])
        stats = engine.stats()
        if kept:
            assert stats.checkpoints.n > 0
        if mode == "cell" and "checkpoint_bytes" in kept:
            assert stats.checkpoints.n_bytes <= 60_000 and stats.checkpoints.n_evicted
    assert found[0] == found[1] == found[2]


def test_their_bytes_are_bounded_in_blocks_by_the_room_of_their_pools():
    kept = KEPT | {"n_checkpoints": 2}
    without, eight = (make("recurrent", "paged", **x).space.pools for x in ({}, kept))
    more = [b.n_blocks - a.n_blocks for a, b in zip(without, eight, strict=True)]
    # Two of each of four sequences, a state each; layers that keep all need none.
    assert sorted(more) == [0, 8]
    n_bytes = make("recurrent", "paged", **kept).stats().cache_bytes
    n_bytes -= make("recurrent", "paged").stats().cache_bytes
    three = make("recurrent", "paged", **kept, checkpoint_bytes=n_bytes // 8 * 3 + 1).space.pools
    assert sum(b.n_blocks - a.n_blocks for a, b in zip(without, three, strict=True)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, src, dst",
    [
        ("recurrent", "cell", "paged"),
        ("recurrent", "paged", "cell"),
        ("window", "cell", "paged"),
        ("window", "paged", "cell"),
    ],
)
def test_a_session_of_an_engine_has_its_checkpoints(kind, src, dst, tmp_path):
    """After a restart, of either kind of cache, a prompt that ends otherwise hits as before it."""
    before = make(kind, src, **KEPT)
    served(before, [ask("first", FIRST)])
    session.save(tmp_path / "a.kv", before.save(FIRST))
    taken = session.read(tmp_path / "a.kv")
    ends = [c.pos for c in taken.checkpoints]
    assert {16, 32, 48} <= set(ends), ends
    after = make(kind, dst, **KEPT)
    after.load(taken)
    other = ask("other", [*FIRST[:50], 3, 4])
    found, n_cached = served(after, [other])
    assert n_cached["other"] >= 48
    assert found["other", 0] == alone(kind, other)
    if dst == "cell":
        config = dataclasses.replace(engines.runtime(kind).config, **KEPT)
        at = Runtime(engines.MODELS[kind](), config)
        at.restore(taken)
        assert {16, 32, 48} <= set(at.checkpoints())


@pytest.mark.parametrize(
    "mode, change, message",
    [
        ("paged", {"checkpoint_interval": 18}, "hits end with blocks of 4; it must be a multiple"),
        ("paged", {"checkpoint_interval": 2}, "is 2 tokens, a step runs n_ubatch = 8"),
        ("paged", {"checkpoint_bytes": 100}, "checkpoint_bytes is 100, one checkpoint of this"),
        ("cell", {"checkpoint_bytes": 100}, "checkpoint_bytes is 100, one checkpoint of this"),
        (
            "cell",
            {"prefix_cache": False},
            "requests find checkpoints in the prefix cache, and there",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_when_it_is_made(mode, change, message):
    with pytest.raises(BadConfig) as error:
        make("recurrent", mode, **(KEPT | change))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("border", [0, 4])
def test_a_border_outside_the_prompt_is_refused(border):
    with pytest.raises(BadRequest, match=r"^request 'a': border .* \[1, 3\]"):
        ask("a", [1, 2, 3], borders=(border,))

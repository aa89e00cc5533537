"""Sessions of engines: out of the prefix cache, into another one, to a Runtime and from one."""

import dataclasses

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, ContextShift, MaskSpec, Runtime, session
from kvrt.errors import (
    BadConfig,
    BadRequest,
    BadSequence,
    BadSession,
    CacheFull,
    SessionMismatch,
    UsageError,
)
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import TierConfig
from kvrt.serving.engine import Engine
from tests.marks import slow
from tests.serving.engines import MODELS, N_BATCH, B, ask, make, one, run
from tests.toys import ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

# Logits of 6 and less: only which tokens are summed together differs.
TOLERANCE = 1e-5
TEXT = [(7 * i + i // 5) % 32 for i in range(80)]


BOTH = [
    *[("paged", "full"), slow("paged", "window"), ("paged", "recurrent")],
    *[slow("cell", "full"), slow("cell", "window"), slow("cell", "recurrent")],
]


def saved(at, path, what):
    session.save(path, at.save(what))
    return session.read(path)


def computed(kind, n=40, **options):
    """An engine that has n tokens of the text in its prefix cache."""
    at = make(kind, **options)
    run(at, [ask("first", TEXT[:n], 1)])
    return at


def hit(at, n=43, **options):
    """The tokens and logits of a request that begins with the text, and its prefix hit."""
    at.add_request(ask("hit", TEXT[:n], 6, **options))
    tokens, logits, cached = [], [], []
    while at.has_work:
        for out in at.step():
            assert out.error is None
            cached.append(out.n_cached)
            tokens += out.tokens
            logits += [np.asarray(at.logits(out.id))] * len(out.tokens)
    return cached[0], tokens, np.stack(logits)


def free(at):
    """What each pool, or group, has free, and references: nothing is lost by a save or a load."""
    return [(p.n_free, [p.n_refs(i) for i in range(p.n_blocks)]) for p in at.space.pools]


def runtime_of(kind, **options):
    sizes = {"n_ctx": 128, "block_size": 16, "n_ubatch": N_BATCH, **options}
    return Runtime(MODELS[kind](), CacheConfig(**sizes))


# --- one engine to another ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "dtype", "rope"),
    [
        ("paged", "full", "f32", "write"),
        ("paged", "window", "int8", "read"),
        ("paged", "recurrent", "f32", "write"),
        ("cell", "window", "int8", "read"),
        ("cell", "recurrent", "f32", "write"),
    ],
)
def test_a_hit_from_a_file_is_the_hit_of_the_one_who_computed_it(tmp_path, mode, kind, dtype, rope):
    options = {"mode": mode, "type_k": dtype, "type_v": dtype, "rope": rope}
    first, other = computed(kind, **options), make(kind, **options)
    before = free(first)
    taken = saved(first, tmp_path / "a.kv", TEXT[:43])
    assert free(first) == before
    assert other.load(taken) == {0: 40}
    wanted, found = hit(first), hit(other)
    assert found[0] == wanted[0] == 40 and found[1] == wanted[1]
    np.testing.assert_array_equal(found[2], wanted[2])
    if (mode, kind) == ("cell", "window"):
        return  # what no later token sees was saved as well, and is not loaded
    # Saved again, it is the same to the bit.
    again = other.save(TEXT[:40])
    for a, b in zip(jax.tree.leaves(as_tree(taken)), jax.tree.leaves(as_tree(again)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def as_tree(snapshot):
    parts = [(g.index, g.pos, g.seqs, [(b.k, b.v) for b in g.blocks]) for g in snapshot.groups]
    return parts, snapshot.states and snapshot.states.tables


@pytest.mark.slow
def test_more_than_a_block_of_a_file_and_layers_in_several_groups(tmp_path):
    """300 tokens are two blocks of a file; 3 layers of two kinds are three groups of a pool."""
    masks = [MaskSpec(), *[MaskSpec(kind="window", size=280)] * 2]
    text = np.random.default_rng(3).integers(0, 32, 306).tolist()

    def opened():
        return make_of(ToyLm(n_layers=3, masks=masks), n_ctx=512, n_ubatch=64, block_size=8)

    first, other = opened(), opened()
    run(first, [ask("a", text[:305], 1)])
    assert other.load(saved(first, tmp_path / "a.kv", text)) == {0: 304}
    found = [one(at, ask("b", text, 4)) for at in (first, other)]
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def make_of(model, **sizes):
    return Engine(model, CacheConfig(n_seq_max=4, **sizes), EngineConfig())


@pytest.mark.slow
def test_what_is_cached_already_stays(tmp_path):
    at = computed("full")
    taken = saved(at, tmp_path / "a.kv", TEXT)
    before = free(at)
    assert at.load(taken) == {0: 40} and free(at) == before
    other = make("full")
    run(other, [ask("a part", TEXT[:20], 1)])
    assert other.load(taken) == {0: 40}
    assert other.space.pools[0].n_cached == 40 // B
    assert hit(other)[0] == 40


@pytest.mark.slow
def test_a_running_request_is_saved_as_far_as_it_is(tmp_path):
    at = make("full")
    at.add_request(ask("a", TEXT[:40], 6, salt=b"x"))
    at.step()
    assert at.save("a").history.pieces[0][0].shape[1] == N_BATCH
    while at.has_work:
        at.step()
    with pytest.raises(BadRequest, match="request 'a', sample 0, is not being served"):
        at.save("a")
    # Another salt finds nothing, there nor here.
    with pytest.raises(UsageError, match="nothing of these 40 tokens to save"):
        at.save(TEXT[:40])
    other = make("full")
    other.load(at.save(TEXT[:40], salt=b"x"), salt=b"y")
    assert [hit(other)[0], hit(other, salt=b"y")[0]] == [0, 40]


@pytest.mark.slow
def test_what_a_policy_moved_is_neither_saved_nor_loaded(tmp_path):
    rules = {"n_ctx": 64, "n_ubatch": 16}
    policy = ContextShift(n_keep=10)
    at = make("full", **rules)
    at.add_request(ask("endless", TEXT[:60], 40, policy=policy))
    while not (at.running and at.running[0].n_dropped):
        at.step()
    # Two blocks of four among the ten that stay.
    taken = at.save("endless")
    assert taken.history.pieces[0][0][1].tolist() == TEXT[:8]
    moved = Runtime(ToyLm(), CacheConfig(n_ctx=64, n_ubatch=16), policy=policy)
    moved.append(TEXT)
    assert moved.n_exact() == 10
    other = make("full")
    assert other.load(moved.snapshot()) == {0: 8}


# --- an engine and a Runtime ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), BOTH)
def test_a_runtime_goes_on_from_an_engines_file(tmp_path, mode, kind):
    taken = saved(computed(kind, mode=mode), tmp_path / "a.kv", TEXT[:43])
    at, whole = runtime_of(kind), runtime_of(kind)
    at.restore(taken)
    for start in (0, 16, 32):
        whole.append(TEXT[start : min(start + 16, 40)])
    for i in range(40, 60):
        found, wanted = at.append(TEXT[i : i + 1]), whole.append(TEXT[i : i + 1])
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert at.token_history()[1].tolist() == TEXT[:60]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), BOTH)
def test_an_engine_begins_from_a_runtimes_file(tmp_path, mode, kind):
    at = runtime_of(kind)
    for start in (0, 16, 32):
        at.append(TEXT[start : min(start + 16, 40)])
    session.save(tmp_path / "a.kv", at.snapshot())
    other = make(kind, mode)
    assert other.load(session.read(tmp_path / "a.kv")) == {0: 40}
    n_cached, tokens, logits = hit(other)
    assert n_cached == 40
    wanted = hit(computed(kind, mode=mode))
    assert tokens == wanted[1]
    np.testing.assert_allclose(logits, wanted[2], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
def test_several_sequences_that_share_a_beginning(tmp_path):
    at = runtime_of("full", n_seq_max=3)
    at.append(TEXT[:24])
    at.seq_cp(0, 2)
    at.append(TEXT[24:40])
    at.append([1, 2, 3, 4, 5, 6, 7, 8], 2)
    other = make("full")
    assert other.load(at.snapshot()) == {0: 40, 2: 32}
    assert other.space.pools[0].n_cached == (40 + 8) // B
    alone = make("full")
    assert alone.load(at.snapshot(), [2]) == {2: 32}
    with pytest.raises(BadSequence, match=r"sequence 1 is not in the session, which holds \[0, 2"):
        alone.load(at.snapshot(), [1])


@pytest.mark.slow
def test_states_and_windows_come_from_checkpoints_too():
    """45 tokens end within a block; a checkpoint at 32 has the state of a block's end."""
    at = runtime_of("recurrent", n_checkpoints=4, checkpoint_interval=16)
    at.append(TEXT[:45])
    other = make("recurrent")
    assert other.load(at.snapshot()) == {0: 32}
    wanted = computed("recurrent", 32)
    assert hit(other)[1] == hit(wanted)[1]
    bare = runtime_of("recurrent")
    bare.append(TEXT[:45])
    with pytest.raises(SessionMismatch, match="no state of recurrent layers at token 44"):
        make("recurrent").load(bare.snapshot())


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.slow
def test_windows_that_were_dropped_give_no_hit():
    at = runtime_of("window")
    at.append(TEXT[:41])
    part = at.snapshot()
    short = [dataclasses.replace(g) for g in part.groups]
    for i in (1, 2):
        g = short[i]
        left = g.pos >= 33
        blocks = [
            session.KVBlock(k=np.asarray(b.k)[:, left], v=np.asarray(b.v)[:, left])
            for b in g.blocks
        ]
        short[i] = dataclasses.replace(
            g,
            index=g.index[left],
            pos=g.pos[left],
            seqs=g.seqs[left],
            blocks=blocks,
            lost={0: ((0, 33),)},
        )
    other = make("window")
    with pytest.raises(SessionMismatch, match="with a window of 9, and a prefix hit at token 40"):
        other.load(dataclasses.replace(part, groups=tuple(short)))
    assert other.space.pools[0].n_cached == 0


def test_another_model_and_another_cache_are_refused():
    taken = computed("full").save(TEXT[:40])
    other = make_of(ToyLm(seed=1), n_ctx=64)
    with pytest.raises(SessionMismatch, match=r"model\.weights is "):
        other.load(taken)
    with pytest.raises(SessionMismatch, match="rope is write in the session and read here"):
        make("full", rope="read").load(taken)
    half = make("full", type_k="f16", type_v="f16")
    with pytest.raises(SessionMismatch, match="type_k is f32 in the session and f16 here"):
        half.load(taken)
    assert half.space.pools[0].n_cached == 0
    assert half.load(taken, convert=True) == {0: 40}


def test_a_session_longer_than_the_cache_is_refused(tmp_path):
    taken = computed("full", 80).save(TEXT)
    small = make("full", n_ctx=32, n_ubatch=16)
    before, n = free(small), small.space.pools[0].n_free
    assert n < 20
    said = rf"the session needs 20 blocks, {n} of {n} are free; raise n_ctx, or trim"
    with pytest.raises(CacheFull, match=said):
        small.load(taken)
    assert free(small) == before


@pytest.mark.slow
def test_a_cache_in_use_refuses_what_does_not_fit():
    taken = computed("full", 80).save(TEXT)
    at = make("full", n_ctx=96)
    at.add_request(ask("runs", TEXT[30:60], 20))
    for _ in range(4):
        at.step()
    before, n = free(at), at.space.pools[0].n_free
    assert n < 20
    with pytest.raises(CacheFull, match=f"the session needs 20 blocks, {n} of "):
        at.load(taken)
    assert free(at) == before
    while at.has_work:
        at.step()
    assert at.load(taken) == {0: 80}


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "a.kv"
    session.save(path, computed("full").save(TEXT[:40]))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(BadSession, match="has another xxh3-128 than it was written with"):
        session.read(path)


def test_without_a_prefix_cache_there_is_nowhere_to_go():
    at = Engine(ToyLm(), CacheConfig(n_ctx=32, block_size=4), EngineConfig(prefix_cache=False))
    for call in (lambda: at.save(TEXT[:8]), lambda: at.load(computed("full").save(TEXT[:8]))):
        with pytest.raises(BadConfig, match="goes into the prefix cache, and there is none"):
            call()


@pytest.mark.slow
def test_cells_take_any_number_of_tokens_and_refuse_what_has_no_room():
    at = runtime_of("full")
    at.append(TEXT[:43])
    other = make("full", "cell", n_ctx=64)
    assert other.load(at.snapshot()) == {0: 43} and hit(other, 46)[0] == 43
    assert other.load(at.snapshot()) == {0: 43}
    other.add_request(ask("runs", TEXT[30:60], 30))
    other.step()
    before = free(other)
    at.append(TEXT[43:80])
    with pytest.raises(CacheFull, match="the session needs 34 cells, 10 of 64 are free; raise"):
        other.load(at.snapshot())
    assert free(other) == before
    run(other, [])
    states = make("recurrent", "cell", n_seq_max=1)
    one_by_one = runtime_of("recurrent", n_seq_max=2)
    one_by_one.append(TEXT[:20], 0)
    one_by_one.append(TEXT[20:40], 1)
    assert states.load(one_by_one.snapshot()) == {0: 20, 1: 20}


def test_less_than_a_block_is_no_session():
    at = runtime_of("full")
    at.append(TEXT[:3])
    with pytest.raises(SessionMismatch, match=r"3 tokens of the session .* less than a block of 4"):
        make("full").load(at.snapshot())


@pytest.mark.slow
def test_what_a_tier_has_is_saved_as_well(tmp_path):
    tiers = TierConfig(host_bytes=1 << 20, always=True)
    at = make("full", n_ctx=64, tiers=tiers)
    run(at, [ask("first", TEXT[:40], 1)])
    wanted = as_tree(at.save(TEXT[:40]))
    at.tiers.flush()
    for i in range(3):
        run(at, [ask(i, np.random.default_rng(i).integers(0, 32, 50), 1)])
        at.tiers.flush()
    found = as_tree(at.save(TEXT[:40]))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    # What is loaded goes to the tier like what is computed.
    other = make("full", n_ctx=64, tiers=tiers)
    other.load(at.save(TEXT[:40]))
    other.tiers.flush()
    assert other.stats().tiers["host"].n_bytes > 0
    at.close()
    other.close()

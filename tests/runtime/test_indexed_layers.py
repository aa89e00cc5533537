"""Layers that read what an indexer chooses: against NumPy that sorts scores, and transformers."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from kvrt import (
    CacheConfig,
    ContextShift,
    Engine,
    EngineConfig,
    Indexed,
    MaskSpec,
    MeshSpec,
    Quest,
    Runtime,
    SelfExtend,
    session,
)
from kvrt.attention.select.indexer import choose_places
from kvrt.errors import BadConfig, SessionMismatch
from kvrt.policies.scored import H2O
from kvrt.session import described
from tests.indexedlm import INDEX, N_CELLS, PLAIN, IndexedLm, PlainIndexed
from tests.latentlm import ROPE, Plain, rotated
from tests.marks import slow
from tests.runtime.alongside import TEXT, read

SIZES = {"n_ctx": 64, "block_size": 8, "n_ubatch": 8, "n_seq_max": 3}


@functools.cache
def model():
    return IndexedLm()


@functools.cache
def made(policy=None, **options):
    return Runtime(model(), CacheConfig(**{**SIZES, **options}), policy=policy)


def runtime(policy=None, **options):
    found = made(policy, **options)
    found.clear()
    return found


def run_history(at, oracle, tolerance=1e-4):
    """A prompt, a gap that closes, a fork that goes on otherwise, both decode, defrag."""
    one = functools.partial(read, at, tolerance=tolerance)
    one(oracle, TEXT[:19])
    at.seq_rm(0, 3, 12)
    at.seq_add(0, 12, None, -9)
    oracle.remove(3, 12)
    oracle.move(12, -9)
    one(oracle, TEXT[20:27])
    at.seq_cp(0, 1)
    fork = oracle.copy()
    one(oracle, TEXT[27:30])
    one(fork, TEXT[40:45], 1)
    for a, b in ((3, 9), (4, 9)):
        found = at.decode({0: a, 1: b})
        for seq_id, (of, token) in enumerate(((oracle, a), (fork, b))):
            wanted = of.step([token])[0]
            np.testing.assert_allclose(found[seq_id], wanted, atol=tolerance, rtol=0)
    at.seq_rm(0, 0, 4)
    at.seq_add(0, 4, None, -4)
    oracle.remove(0, 4)
    oracle.move(4, -4)
    at.defrag()
    one(oracle, TEXT[30:33])
    one(fork, TEXT[45:46], 1)


@pytest.mark.parametrize("rope", ["write", slow("read")])
def test_logits_are_those_of_sorted_scores(rope):
    at = runtime(rope=rope)
    run_history(at, PlainIndexed(model()))
    # Places in block lists are the same tokens in both groups.
    latents, keys = at.group_cells
    jax.tree.map(np.testing.assert_array_equal, latents, keys)


@pytest.mark.parametrize("rope", ["write", slow("read")])
def test_long_lists_are_gathered_and_short_ones_masked(rope):
    """Of 5 tokens each: up to 40 cells all are read once, beyond them those that were chosen."""
    at, oracle = runtime(rope=rope), PlainIndexed(model())
    read(at, oracle, TEXT[:61])
    np.testing.assert_allclose(at.decode({0: 3})[0], oracle.step([3])[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("wrong", ["later of equals", "recent"])
def test_another_choice_is_seen(wrong):
    """The controls: equal scores go to the lower position, and which are chosen counts."""
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        read(runtime(), PlainIndexed(model(), wrong), TEXT[:19])


def test_what_fits_is_read_whole():
    """As without an indexer: one more token than are chosen makes the difference."""
    at, dense = runtime(), Plain(model())
    read(at, dense, TEXT[:N_CELLS])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        read(at, dense, TEXT[N_CELLS : N_CELLS + 8])


@pytest.mark.slow
def test_a_context_shift_moves_index_keys_too():
    policy = ContextShift(n_keep=2, n_discard=6)
    at, oracle = runtime(policy, n_ctx=24), PlainIndexed(model())
    read(at, oracle, TEXT[:17])
    for token in TEXT[17:40]:
        end = max(row.pos for row in oracle.rows) + 1
        if end == 23:
            oracle.remove(2, 8)
            oracle.move(8, -6)
        found = at.decode({0: token})[0]
        np.testing.assert_allclose(found, oracle.step([token])[0], atol=1e-4, rtol=0)
    assert len(at.stats().drops) > 2


@pytest.mark.slow
def test_a_shift_rotates_what_rope_has_of_index_keys_and_nothing_else():
    at = runtime()
    at.append(TEXT[:20])
    before = jax.tree.map(np.asarray, at.cache.stores[1])
    at.seq_add(0, 5, None, 11)
    after = jax.tree.map(np.asarray, at.cache.stores[1])
    assert before.k[0].shape == (8, 1, ROPE, 8) and before.v[0].shape == (8, 1, 8, PLAIN)
    assert PLAIN + ROPE == INDEX
    jax.tree.map(np.testing.assert_array_equal, after.v, before.v)
    delta = np.where(np.arange(64) < 20, np.where(np.arange(64) < 5, 0, 11), 0)
    for new, old in zip(after.k, before.k, strict=True):
        cells = old.transpose(0, 3, 1, 2).reshape(64, ROPE)
        wanted = rotated(cells, delta, "neox")
        np.testing.assert_allclose(
            new.transpose(0, 3, 1, 2).reshape(64, ROPE), wanted, atol=1e-5, rtol=0
        )


@pytest.mark.slow
def test_a_session_has_index_keys(tmp_path):
    at, oracle = runtime(), PlainIndexed(model())
    read(at, oracle, TEXT[:19])
    snapshot = at.snapshot()
    assert [g.blocks[0].k.shape[-1] + g.blocks[0].v.shape[-1] for g in snapshot.groups] == [
        40,
        INDEX,
    ]
    session.save(tmp_path / "x.kv", snapshot)
    at.clear()
    at.append(TEXT[50:53], 1)
    at.restore(session.read(tmp_path / "x.kv"), {0: 2})
    read(at, oracle, TEXT[20:23], 2)
    said = [{**group} for group in snapshot.fingerprint["groups"]]
    assert "indexed" not in said[1] and described.groups(snapshot.fingerprint) == model().groups
    said[0] |= {"indexed": {**said[0]["indexed"], "n_cells": 6}}
    other = dataclasses.replace(snapshot, fingerprint={**snapshot.fingerprint, "groups": said})
    with pytest.raises(SessionMismatch, match=r"indexed.n_cells is 6 in the session and 5 here"):
        at.restore(other)


@pytest.mark.slow
def test_quantized_index_keys_choose_nearly_the_same():
    """Only the index keys are coarse, so that nothing but the choice can differ."""
    at, oracle = runtime(type_k=("f32", "int8"), type_v=("f32", "int8")), PlainIndexed(model())
    found = np.asarray(at.append(TEXT[:40], out_ids=range(40)))
    far = np.abs(found - oracle.step(TEXT[:40])).max(axis=1)
    assert np.median(far) < 1e-4


@pytest.mark.parametrize("n_cells", [1, 5, 30])
def test_chosen_places_are_those_of_a_sort(n_cells):
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 4, (6, 30)).astype(np.float32) * np.float32(0.5)
    scores[0, 3], scores[0, 4], scores[1] = np.nan, -np.float32(np.nan), 0.0
    scores[1, ::3] = -0.0
    seen = rng.random((6, 30)) < 0.6
    seen[0, 3:5], seen[5] = True, False
    pos = rng.permutation(30)[None].astype(np.int32)
    pos[0, 7] = pos[0, 11]
    found = np.asarray(choose_places(jax.numpy.asarray(scores), seen, pos, n_cells))
    for t in range(6):
        known = np.where(np.isnan(scores[t]), np.inf, scores[t])
        order = sorted((-known[c], pos[0, c], c) for c in np.flatnonzero(seen[t]))
        assert set(np.flatnonzero(found[t])) == {c for *_, c in order[:n_cells]}


def raises(says, act):
    with pytest.raises(BadConfig, match=says) as caught:
        act()
    assert "\n" not in str(caught.value)


OPTIONS = {
    "SelfExtend of kind 'paper' compares distant keys by grouped positions": {
        "rope": "read",
        "self_extend": SelfExtend(ga_n=2, ga_w=8, kind="paper"),
    },
    "select chooses cells for each kv head, and a latent is one key": {
        "select": Quest(n_cells=96, n_dense=0),
        "block_size": 16,
    },
}


@pytest.mark.parametrize("says", OPTIONS)
def test_a_cache_that_an_indexer_cannot_rank_is_refused(says):
    raises(says, lambda: Runtime(model(), CacheConfig(**{**SIZES, **OPTIONS[says]})))


def test_what_an_indexer_does_not_go_with_is_refused():
    config = CacheConfig(**SIZES)
    for mode in ("cell", "paged"):
        options = EngineConfig(mode=mode, shared_reads=True)
        raises("have no prefix to read once", lambda x=options: Engine(model(), config, x))
    raises(
        "an indexer ranks all cells of a sequence together",
        lambda: Runtime(model(), config, mesh=MeshSpec()),
    )
    raises(
        "layers that keep a latent have one cell a token for all heads, which H2O",
        lambda: Runtime(model(), config, policy=H2O(budget=32)),
    )


class Other(IndexedLm):
    """The same with other groups; `skips` leaves out what queries choose by."""

    def __init__(self, groups=None, skips=False):
        super().__init__()
        self.groups, self.skips = groups or self.groups, skips

    def before(self, i, x, attend):
        if not self.skips:
            super().before(i, x, attend)


def test_groups_that_an_indexer_cannot_have_are_refused():
    latents, keys = model().groups
    one = Indexed(n_cells=5, keys_of=((0, 2),))
    replaced = dataclasses.replace
    raises(
        r"indexed names index keys of layers \[0\], the group has \[0, 1\]",
        lambda: replaced(latents, indexed=one),
    )
    for change in ({"mask": MaskSpec(kind="window", size=9)}, {"latent_rank": 0}):
        raises("an indexer chooses one set of cells for", lambda c=change: replaced(latents, **c))
    raises("n_cells of indexed is 0", lambda: Indexed(n_cells=0, keys_of=()))
    config, says = CacheConfig(**SIZES), r"layers \[2, 3\] keep index keys: they must be all layers"
    for other in (
        replaced(keys, mask=MaskSpec(kind="window", size=9)),
        replaced(keys, layers=(2,)),
    ):
        raises(says, lambda x=other: Runtime(Other((latents, x)), config))


def test_a_model_that_does_not_say_what_to_choose_by_is_refused():
    config = CacheConfig(**SIZES, attention="chunked")
    raises("call Attend.index before it", lambda: Runtime(Other(skips=True), config).append([1]))
    dense = dataclasses.replace(model().groups[0], indexed=None)
    at = Runtime(Other((dense, model().groups[1])), config)
    raises("has no `indexed` in its group and gives index keys", lambda: at.append([1]))

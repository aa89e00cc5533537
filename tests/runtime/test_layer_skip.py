"""Drafts by the first layers: text and cache of plain decoding, every layer once a token."""

import functools

import jax
import numpy as np
import pytest
from test_speculation import (
    EACH_KIND,
    KINDS,
    N_DRAFT,
    N_VOCAB,
    POLICIES,
    PROMPT,
    WINDOW,
    build,
    ids,
    run,
    same_cache,
)

from kvrt import CacheConfig, GenerationSpec, LayerSkip, MaskSpec, Runtime, Sampling, Speculation
from kvrt.cells.cells import owned
from kvrt.errors import BadConfig
from kvrt.policies.scored import H2O
from kvrt.store.kv import read_kv
from tests.marks import first_fast
from tests.matrix.plainmodel import PlainModel
from tests.numpy_device.device import installed
from tests.retentiontoy import decoder
from tests.sharedlm import CLA2, SharedLm
from tests.toys import RowModel, ToyLm

EXIT = {"shared": 2}
EACH = first_fast(k for k in EACH_KIND if k not in ("recurrent", "hybrid"))
# The states of layers that draft, and of the one behind them.
WHOLE = {"programs": "whole"}
STATES = {
    "recurrent+full": {},
    "delta+full": WHOLE,
    "full+delta": WHOLE,
    "recurrent+window": {"n_rs_seq": 3},
    "retention": {},
    "full+window": {"policy": H2O(budget=24)},
    "full+wide_window": {"policy": H2O(budget=24), **WHOLE},
}


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """Texts are drafted for however few drafts stay: what backs off has tests of its own."""
    monkeypatch.setattr("kvrt.runtime.stepper.after_round", lambda before, *_: before)


def spec(exit_layer=1, n_draft=N_DRAFT):
    return Speculation(drafter=LayerSkip(exit_layer=exit_layer), n_draft=n_draft)


def plain_of(kind="full", **options):
    """A runtime that decodes plainly, in NumPy where it can be."""
    with installed():
        return build(kind, **options)


def drafted_like(plain, drafted, exit_layer=1, n=48, tolerance=5e-5, **asked):
    """Runs both ways; text and cache are the same, and some drafts stayed."""
    text = ids(run(plain, n, **asked))
    drafted.prefill(PROMPT)
    found = ids(drafted.generate(n, speculation=spec(exit_layer), **asked))
    assert found == text
    same_cache(plain, drafted, tolerance)
    same_cells(drafted)
    stats = drafted.stats()
    assert 0 < stats.n_accepted < stats.n_drafted


def same_cells(runtime):
    """The device has the cells that the host knows of: refused drafts left none."""
    for host, device in zip(runtime.group_cells, runtime.cache.cells, strict=True):
        n = len(host.pos)
        np.testing.assert_array_equal(np.asarray(device.pos)[:n], host.pos)
        np.testing.assert_array_equal(np.asarray(device.seqs)[:n], host.seqs)


@pytest.mark.parametrize("kind", EACH)
def test_text_and_cache_are_those_of_plain_decoding(kind):
    drafted = build(kind)
    drafted_like(plain_of(kind), drafted, EXIT.get(kind, 1))
    assert {k[0] for k in drafted.programs.compiled()} >= {"layer_skip"}


@pytest.mark.parametrize("name", first_fast(STATES))
def test_states_are_those_of_plain_decoding(name, monkeypatch):
    make = decoder if name == "retention" else functools.partial(PlainModel, name)
    monkeypatch.setitem(KINDS, name, make)
    drafted_like(plain_of(name, **STATES[name]), build(name, **STATES[name]))


@pytest.mark.slow
def test_another_type_and_frame():
    options = {"rope": "read", "type_k": "int8"}
    drafted_like(plain_of("window", **options), build("window", **options), tolerance=0.1)


def entries(runtime, group):
    """Keys and values of all cells of sequence 0 in a group, by position and layer."""
    cells, store = runtime.group_cells[group], runtime.cache.stores[group]
    mine = np.flatnonzero(owned(cells, 0)).astype(np.int32)
    mine = mine[np.argsort(cells.pos[mine])]
    kv = [np.asarray(x) for layer in range(len(store.k)) for x in read_kv(store, layer, mine)]
    return cells.pos[mine].tolist(), kv


@pytest.mark.slow
def test_refused_drafts_leave_nothing_in_cells_that_windows_use_again():
    plain, drafted = (build("window") for _ in range(2))
    drafted.prefill(PROMPT)
    tokens = drafted.generate(60, speculation=spec())
    for _ in range(40):
        next(tokens)
    stats = drafted.stats()
    assert stats.n_accepted < stats.n_drafted == N_DRAFT * stats.n_rounds
    text = drafted.token_history()[1].tolist()
    assert text[: len(PROMPT)] == PROMPT
    plain.prefill(PROMPT)
    for token in text[len(PROMPT) :]:
        plain.decode({0: token})
    (pos, kv), (other_pos, other_kv) = entries(plain, 0), entries(drafted, 0)
    n = len(other_pos)
    assert pos[-n:] == other_pos and WINDOW.size < n < len(text)
    for x, y in zip(kv, other_kv, strict=True):
        np.testing.assert_allclose(x[-n:], y, atol=5e-5)
    same_cells(drafted)


COUNTED = [0]


class Counting(ToyLm):
    """Counts the tokens that go through layers; the second adds nothing to what the first says."""

    def __init__(self):
        super().__init__(n_vocab=N_VOCAB)
        qkv = self.qkv[1]
        width = qkv.shape[1] * self.n_kv_heads // (self.n_heads + 2 * self.n_kv_heads)
        qkv[...] = qkv[...].at[:, -width:].set(0.0)

    def layers(self, x, attend, first, last):
        def count():
            COUNTED[0] += x.shape[0] * (last - first)

        jax.debug.callback(count)
        return super().layers(x, attend, first, last)


@pytest.mark.slow
def test_every_layer_runs_once_for_every_token_of_a_round():
    runtime = Runtime(Counting(), CacheConfig(n_ctx=128, block_size=8, n_ubatch=16))
    runtime.prefill(PROMPT)
    tokens, n, size = runtime.generate(60, speculation=spec()), 60, 2 * (N_DRAFT + 1)
    next(tokens)
    jax.effects_barrier()
    before = COUNTED[0]
    for i in range(2, n - N_DRAFT):
        next(tokens)
        jax.effects_barrier()
        n_rounds = runtime.stats().n_rounds
        assert COUNTED[0] - before == size * n_rounds, i
    stats = runtime.stats()
    assert stats.n_accepted == stats.n_drafted == N_DRAFT * stats.n_rounds and n_rounds == 9


@pytest.mark.slow
def test_there_is_no_second_cache():
    plain, drafted = build("full", n_ctx=1024), build("full", n_ctx=1024)
    run(plain)
    drafted.prefill(PROMPT)
    list(drafted.generate(20, speculation=spec()))
    sizes = [sum(x.nbytes for x in jax.tree.leaves(r.cache)) for r in (plain, drafted)]
    assert sizes[0] == sizes[1]
    layer = drafted.cache.stores[0].k[0].nbytes
    assert (
        drafted.programs.temp_bytes("layer_skip") - plain.programs.temp_bytes("decode_steps")
        < layer
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shift", "checkpoints"])
def test_policies_cut_rounds_and_change_no_text(name):
    kind = {"checkpoints": "window"}.get(name, "full")
    plain, drafted = plain_of(kind, **POLICIES[name]), build(kind, **POLICIES[name])
    drafted_like(plain, drafted, n=60)
    assert drafted.stats().n_shift == plain.stats().n_shift


def test_a_sequence_in_blocks_keeps_them():
    plain, drafted = plain_of(), build()
    text = ids(run(plain))
    drafted.append(PROMPT)
    drafted.to_blocks(0)
    assert ids(drafted.generate(48, speculation=spec())) == text
    same_cache(plain, drafted)
    same_cells(drafted)
    assert len(drafted.table(0)[0]) == -(-(len(PROMPT) + 47) // 8)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_it_gives_as_many_tokens_as_were_asked(n):
    plain, drafted = plain_of(), build()
    run(plain, n)
    drafted.prefill(PROMPT)
    assert len(list(drafted.generate(n, speculation=spec()))) == n
    same_cache(plain, drafted)


@pytest.mark.slow
def test_a_round_is_compiled_ahead():
    runtime = build()
    asked = {"n_predict": 9, "seq_id": 0, "sampling": Sampling(), "stop_ids": (), "recent": ()}
    runtime.prepare(8, GenerationSpec(**asked, n_best=0, stride=1, speculation=spec()))
    runtime.prefill(PROMPT)
    list(runtime.generate(9, speculation=spec()))
    kinds = [k[0] for k in runtime.programs.compiled()]
    assert kinds.count("layer_skip") == 1 and "verify_round" not in kinds


REFUSED = {
    "behind the last": (
        ToyLm,
        2,
        "the model has 2 layers; some of them must draft",
    ),
    "in parts": (lambda: RowModel(masks=[MaskSpec()]), 1, "RowModel cannot be run in parts; give"),
    "shared": (lambda: SharedLm(kv_of=CLA2), 1, "layer 1 reads the keys and values of layer 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_runs(name):
    make, exit_layer, message = REFUSED[name]
    runtime = Runtime(make(), CacheConfig(n_ctx=64, block_size=8, n_ubatch=16))
    with pytest.raises(BadConfig, match=message):
        runtime.generate(3, speculation=spec(exit_layer))


@pytest.mark.parametrize("exit_layer", [0, -3])
def test_layers_that_draft_are_some(exit_layer):
    with pytest.raises(BadConfig, match=f"exit_layer is {exit_layer}; at least"):
        LayerSkip(exit_layer=exit_layer)

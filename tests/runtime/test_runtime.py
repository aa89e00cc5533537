"""The runtime: refused calls leave no trace, steps of any cut agree, shifts spare other owners."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt import CacheConfig, ContextShift, DropEvent, Runtime, errors
from tests.toys import RowModel, ToyLm, allclose

pytestmark = pytest.mark.usefixtures("numpy_device")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
N_CTX, N_SEQ, N_UBATCH = 24, 3, 8


@pytest.fixture(scope="module")
def model():
    return ToyLm(n_layers=1)


def build(model, mode="write", policy=None, n_ctx=N_CTX):
    config = CacheConfig(n_ctx=n_ctx, n_seq_max=N_SEQ, block_size=8, n_ubatch=N_UBATCH, rope=mode)
    return Runtime(model, config, policy=policy)


@pytest.fixture(scope="module")
def of_module(model):
    """One runtime by key frame, so that each program compiles once."""
    return {mode: build(model, mode) for mode in ("write", "read")}


@pytest.fixture
def runtime(of_module):
    of_module["write"].clear()
    return of_module["write"]


def state_of(runtime):
    """Every byte on either side, and what was counted."""
    host = [np.array(x) for x in jax.tree.leaves(runtime.cells)]
    device = [np.array(x) for x in jax.tree.leaves(runtime.cache)]
    return [x.tobytes() for x in host + device], runtime.stats()


def filled(runtime):
    """Two sequences that share five cells, and four cells left."""
    runtime.clear()
    runtime.append(PROMPT)
    runtime.seq_cp(0, 1, 0, 5)
    runtime.append([7] * 7, 1)
    runtime.append([8, 9, 10, 11, 12], 2)
    return runtime


FULL = "{n} tokens need {n} cells, 4 of 24 are free; turn on context shift or raise n_ctx"
REFUSED = {
    "token": (
        lambda r: r.append([1, 64]),
        errors.BadToken,
        "token id 64 is not in [0, 64), the model's vocabulary",
    ),
    "negative token": (
        lambda r: r.decode({0: 1, 2: -5}),
        errors.BadToken,
        "token id -5 is not in [0, 64), the model's vocabulary",
    ),
    "no token": (
        lambda r: r.append([]),
        errors.BadToken,
        "tokens must be a list of at least one integer id",
    ),
    "out_ids": (
        lambda r: r.append([1, 2], out_ids=[1, 0]),
        errors.BadToken,
        "out_ids must be ascending indices in [0, 2), at least one",
    ),
    "step": (
        lambda r: r.probe([1] * 9),
        errors.BadToken,
        "9 tokens in one step, the limit is 8; raise n_ubatch",
    ),
    "sequence": (
        lambda r: r.append([1], 3),
        errors.BadSequence,
        "sequence 3 does not exist, ids are 0 to 2; raise n_seq_max",
    ),
    "one of the sequences": (
        lambda r: r.decode({0: 1, -1: 1}),
        errors.BadSequence,
        "sequence -1 does not exist, ids are 0 to 2; raise n_seq_max",
    ),
    "target": (
        lambda r: r.seq_cp(0, 3),
        errors.BadSequence,
        "sequence 3 does not exist, ids are 0 to 2; raise n_seq_max",
    ),
    "reversed": (
        lambda r: r.seq_rm(0, 5, 4),
        errors.BadRange,
        "range [5, 4) is reversed; p0 must not exceed p1",
    ),
    "reversed move of shared cells": (
        lambda r: r.seq_add(0, 5, 4, 1),
        errors.BadRange,
        "range [5, 4) is reversed; p0 must not exceed p1",
    ),
    "far": (
        lambda r: r.seq_add(2, 0, None, 2**31 - 2),
        errors.BadRange,
        "position 4 would move by 2147483646 to 2147483650, the limit is 2147483647; "
        "move by 2147483643 at most",
    ),
    "divisor, after a split": (
        lambda r: r.seq_div(1, 2, None, 0),
        errors.BadRange,
        "positions cannot be divided by 0; use 1 to 2147483647",
    ),
    "full": (lambda r: r.append([1] * 5), errors.CacheFull, FULL.format(n=5)),
    "full by far": (lambda r: r.append([1] * 30), errors.CacheFull, FULL.format(n=30)),
    "split": (
        lambda r: r.seq_add(1, 0, None, 1),
        errors.CacheFull,
        "splitting 5 shared cells of sequence 1 needs 5 cells, 4 of 24 are empty; "
        "remove positions or raise n_ctx",
    ),
    "nothing to draw from": (
        lambda r: r.generate(3, 1, stop_ids=[64]),
        errors.BadToken,
        "stop ids (64,); the vocabulary has 64",
    ),
    "n_best": (
        lambda r: r.generate(3, 1, n_best=65),
        errors.BadConfig,
        "n_best is 65; the vocabulary has 64",
    ),
    "stride": (
        lambda r: r.generate(3, stride=0),
        errors.BadConfig,
        "n_predict 3, n_best 0, stride 0; the first two must not be negative and stride at least 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_leaves_no_trace(runtime, case):
    call, error, text = REFUSED[case]
    filled(runtime)
    before = state_of(runtime)
    with pytest.raises(error) as caught:
        call(runtime)
    assert str(caught.value) == text
    assert state_of(runtime) == before
    # Nor in what cannot be seen: where the next search starts, what generation draws from.
    after = runtime.append([5, 6]), list(runtime.generate(2, 1)), runtime.cells.pos.tolist()
    filled(runtime)
    allclose(runtime.append([5, 6]), after[0], 0)
    assert (list(runtime.generate(2, 1)), runtime.cells.pos.tolist()) == after[1:]


def test_a_full_cache_stops_generation_and_keeps_what_it_has(runtime):
    filled(runtime)
    text = []
    with pytest.raises(errors.CacheFull, match=r"^1 tokens need 1 cells, 0 of 24 are free"):
        for token in runtime.generate(None, 2):
            text.append(token.id)
    # Four were fed into the four free cells; the fifth was drawn and had no place.
    assert len(text) == 5
    assert runtime.n_free == 0
    assert runtime.seq_pos_max(2) == 8


# --- steps -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_prompt_in_any_cut_gives_the_same_logits(of_module, model, mode):
    prompt = [(7 * i + 3) % 64 for i in range(20)]
    whole = Runtime(model, CacheConfig(n_ctx=N_CTX, block_size=8, n_ubatch=32, rope=mode))
    expected = whole.append(prompt, out_ids=range(20))
    runtime = of_module[mode]
    for cut in ((20,), (8, 8, 4), (1,) * 20, (3, 10, 7)):
        runtime.clear()
        logits, start = [], 0
        for n in cut:
            logits.append(runtime.append(prompt[start : start + n], out_ids=range(n)))
            start += n
        allclose(np.concatenate(logits), expected)


def test_out_ids_choose_rows_across_steps(runtime):
    prompt = [(5 * i + 2) % 64 for i in range(20)]
    every = np.asarray(runtime.append(prompt, out_ids=range(20)))
    for wanted in ([0], [19], [7, 8], [0, 3, 15, 16, 19], [2, 3]):
        runtime.clear()
        allclose(runtime.append(prompt, out_ids=wanted), every[wanted])
    runtime.clear()
    seen = []
    allclose(runtime.prefill(prompt, progress=lambda *x: seen.append(x)), every[-1])
    assert seen == [(8, 20), (16, 20), (20, 20)]


def test_logits_of_a_middle_row_are_not_drawn_from(runtime):
    runtime.append(PROMPT, out_ids=[2])
    found = runtime.last_logits(0)
    runtime.clear()
    allclose(found, runtime.append(PROMPT))


def test_a_probe_leaves_everything_as_it_was(runtime):
    filled(runtime)
    before = state_of(runtime)
    seen = runtime.probe([1, 2, 3], 1)
    assert seen.shape == (3, 64)
    runtime.probe([1], 2)
    runtime.probe([1, 2], 0)
    programs = before[1].n_compiles, before[1].compile_s
    after = state_of(runtime)
    assert after[0] == before[0]
    assert after[1].n_compiles >= programs[0]
    assert (after[1].n_kv, after[1].cells_used) == (before[1].n_kv, before[1].cells_used)
    allclose(runtime.append([1, 2, 3], 1, out_ids=[0, 1, 2]), seen)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_keys_turned_at_write_and_at_read_agree_after_any_history(of_module, data):
    pair = list(of_module.values())
    for r in pair:
        filled(r)
        r.seq_rm(2)
    for _ in range(data.draw(st.integers(1, 6))):
        seq, p0 = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 9))
        d, n = data.draw(st.integers(-5, 40)), data.draw(st.integers(1, 3))
        for r in pair:
            match n if r.n_free > 6 else 0:
                case 0:
                    r.seq_rm(seq, p0, p0 + 6)
                case 1:
                    r.seq_add(seq, p0, None, d)
                case 2:
                    r.seq_div(seq, p0, None, 3)
                case _:
                    r.append([d % 64, p0], seq)
        allclose(*(r.probe([1, 2, 3], seq) for r in pair), 1e-4)
    assert pair[0].cells.pos.tolist() == pair[1].cells.pos.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_precision_rows_serve_every_operation(kind):
    def history(kind):
        config = CacheConfig(n_ctx=24, n_seq_max=2, block_size=8, type_k=kind, type_v=kind)
        r = Runtime(RowModel(), config)
        r.append(PROMPT)
        r.seq_cp(0, 1)
        r.seq_add(1, 2, None, 3)
        r.seq_rm(0, 0, 1)
        r.defrag(by_sequence=True)
        return r.probe(PROMPT, 1), r.stats().cache_bytes

    (half, half_bytes), (single, single_bytes) = history(kind), history("f32")
    assert 2 * half_bytes == single_bytes
    assert 0 < np.abs(half - single).max() < {"bf16": 0.05, "f16": 0.01}[kind]


# --- context shift -----------------------------------------------------------------------------


def test_drops_are_counted_and_reported(model):
    runtime = build(model, policy=ContextShift(n_keep=2))
    runtime.append(PROMPT, 1)
    assert runtime.stats().drops == ()
    list(runtime.generate(40, 1))
    # 23 tokens are there when the 24th would take the last cell: (23 - 2) // 2 go.
    stats = runtime.stats()
    assert stats.drops[0] == DropEvent(seq_id=1, n_past=23, n_dropped=10)
    assert stats.n_shift == len(stats.drops) == stats.n_kshift == 3
    assert stats.n_dropped == sum(d.n_dropped for d in stats.drops) == 30
    assert (stats.n_ctx, stats.cells_used) == (24, 8 + 39 - 30)
    assert runtime.seq_pos_max(1) == stats.cells_used - 1
    assert stats.cache_bytes == 2 * 24 * 2 * 16 * 4
    assert (stats.n_compiles, stats.n_defrag) == (runtime.programs.n_compiles, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_context_shift_spares_other_owners(model, mode):
    runtime = build(model, mode, ContextShift(n_keep=1), n_ctx=32)
    runtime.append(PROMPT)
    runtime.seq_cp(0, 1)
    runtime.append([9, 9], 1)
    before = np.asarray(runtime.probe([1, 2], 1))
    fed = [(3 * i) % 64 for i in range(18)]
    runtime.append(fed)
    fed += [token.id for token in runtime.generate(9)][:-1]
    drops = runtime.stats().drops
    assert len(drops) == 1
    assert runtime.seq_pos_min(1) == 0
    assert runtime.seq_pos_max(1) == 9
    allclose(runtime.probe([1, 2], 1), before)
    # The sequence that gave way is what it would be in a cache of its own.
    alone, n = build(model, mode, n_ctx=40), drops[0].n_dropped
    split = drops[0].n_past - len(PROMPT)
    alone.append(PROMPT + fed[:split])
    assert n == (drops[0].n_past - 1) // 2
    alone.seq_rm(0, 1, 1 + n)
    alone.seq_add(0, 1 + n, None, -n)
    alone.append(fed[split:])
    assert alone.seq_pos_max() == runtime.seq_pos_max()
    allclose(alone.probe([1, 2]), runtime.probe([1, 2]))


def test_a_context_shift_that_cannot_help_drops_nothing(model):
    runtime = build(model, policy=ContextShift(n_keep=2))
    filled(runtime)
    before = state_of(runtime)
    with pytest.raises(errors.CacheFull) as caught:
        runtime.append([1] * 24, 0)  # its first cells are those of sequence 1 as well
    assert "of 24 are free; raise n_ctx" in str(caught.value)
    assert state_of(runtime) == before


def test_keeping_the_whole_context_is_refused(model):
    with pytest.raises(errors.BadConfig) as caught:
        build(model, policy=ContextShift(n_keep=23))
    assert str(caught.value) == (
        "n_keep is 23, which leaves nothing to drop in 24 cells; keep fewer"
    )


def test_an_empty_sequence_has_no_logits(runtime):
    runtime.append([1, 2, 3], 0)
    runtime.seq_rm(0)
    with pytest.raises(errors.BadToken, match=r"^sequence 0 has no logits to sample from: it is"):
        runtime.generate(1, 0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_progress_that_raises_leaves_whole_steps_and_says_how_many(runtime, error):
    wanted = np.asarray(runtime.append([*PROMPT, *PROMPT, 7, 8]))
    runtime.clear()

    def progress(done, total):
        if done == 16:
            raise error("stop")

    with pytest.raises(error) as caught:
        runtime.append([*PROMPT, *PROMPT, 7, 8], progress=progress)
    (note,) = caught.value.__notes__
    assert note.startswith("16 of 18 tokens were evaluated and stay, at the end of sequence 0;")
    assert runtime.token_history()[1].tolist() == [*PROMPT, *PROMPT] and runtime.n_exact() is None
    # What stays is exact: the rest follows as if nothing had happened.
    np.testing.assert_array_equal(np.asarray(runtime.append([7, 8])), wanted)


def test_an_append_stopped_at_its_first_step_has_nothing_to_say(runtime):
    with pytest.raises(errors.BadToken) as caught:
        runtime.append([1, 99])
    assert not hasattr(caught.value, "__notes__") and runtime.seq_pos_max() == -1


def test_a_fill_that_is_stopped_keeps_count_of_what_is_exact(runtime, monkeypatch):
    runtime.append([*PROMPT, *PROMPT, 7, 8])
    runtime.seq_rm(0, 0, 12)
    step, n_left = runtime._stepper.runner.run, 1

    def some(*args, **rest):
        nonlocal n_left
        if not n_left:
            raise MemoryError
        n_left -= 1
        return step(*args, **rest)

    monkeypatch.setattr(runtime._stepper.runner, "run", some)
    with pytest.raises(MemoryError) as caught:
        runtime.fill([*PROMPT, *PROMPT][:12], 0, 0)
    (note,) = caught.value.__notes__
    assert note.startswith("8 of 12 tokens were evaluated and stay, from position 0 of sequence 0")
    monkeypatch.undo()
    assert len(runtime.token_history()[1]) == 8 + 6 and runtime.n_exact() == 8
    runtime.fill([*PROMPT, *PROMPT][8:12], 0, 8)
    assert runtime.token_history()[1].tolist() == [*PROMPT, *PROMPT, 7, 8]
    assert runtime.n_exact() == 12

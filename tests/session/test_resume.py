"""What goes on after a restore is what would have gone on: tokens, rows and cells, to the bit."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
from histories import (
    EXTEND,
    MODELS,
    aged,
    dropped,
    forked,
    nothing,
    open_runtime,
    plain,
    settled_shift,
    shift,
    tokens,
)

from kvrt import Sampling, errors, session
from kvrt.runtime.generate import After
from tests.marks import full, slow

pytestmark = pytest.mark.usefixtures("numpy_device")

N, M = 9, 11


def equal(a, b):
    """Two snapshots, compared to the bit."""
    left, right = ([np.asarray(x) for x in leaves(s)] for s in (a, b))
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    assert a.fingerprint == b.fingerprint and a.ga_i == b.ga_i
    for g, h in zip(a.groups, b.groups, strict=True):
        assert (g.n_cells, g.head, g.lost) == (h.n_cells, h.head, h.lost)
    assert (a.states and a.states.held) == (b.states and b.states.held)


def leaves(snapshot):
    for g in snapshot.groups:
        yield from (g.index, g.pos, g.seqs)
        for block in g.blocks:
            yield from (block.k, block.v)
    yield from jax.tree.leaves(snapshot.states and snapshot.states.tables)
    for s in snapshot.seq_ids:
        entries = np.concatenate(snapshot.history.pieces[s], axis=1)
        yield entries[:2]
    for s in sorted(snapshot.logits):
        yield snapshot.logits[s][1]


def ids(stream):
    return [t.id for t in stream]


def goes_on(runtime, path, history, *, sampling=Sampling(), between=nothing):  # noqa: B008
    """Generates N + M tokens without a stop, then N, save, something else, restore, M."""

    def begin():
        runtime.clear()
        history(runtime)
        begun = ids(runtime.generate(N, sampling=sampling))
        between(runtime)
        return begun

    def end(begun, token, n_drawn):
        after = After(token=token, n_sampled=n_drawn)
        rest = ids(runtime.generate(M, sampling=sampling, after=after, recent=begun))
        return begun + rest, runtime.snapshot(), runtime.resume_positions().earliest

    begun = begin()
    wanted = end(begun, begun[-1], N)
    if between is nothing:
        runtime.clear()
        history(runtime)
        assert ids(runtime.generate(N + M, sampling=sampling)) == wanted[0]
    assert begin() == begun
    taken = runtime.snapshot({0: session.SamplingState(token=begun[-1], n_drawn=N, sampling={})})
    session.save(path, taken)
    runtime.clear()
    runtime.append([5, 4, 3], 2)
    found = session.read(path)
    equal(found, taken)
    runtime.restore(found)
    equal(runtime.snapshot(), taken)
    went_on = end(begun, found.draws[0].token, found.draws[0].n_drawn)
    assert went_on[0] == wanted[0] and went_on[2] == wanted[2]
    equal(went_on[1], wanted[1])


@pytest.mark.parametrize(
    ("model", "history", "between", "rope", "row_type"),
    [
        full("full, window", plain, nothing, "write", "f32"),
        slow("full, window", plain, nothing, "read", "bf16"),
        slow("full, window", forked, nothing, "write", "f16"),
        slow("full, chunked", plain, nothing, "write", "f32"),
        full("window", plain, nothing, "read", "f32"),
        slow("window", plain, nothing, "write", "bf16"),
        ("full", forked, shift, "write", "f32"),
        ("full", aged, shift, "write", "f32"),
        full("full", forked, shift, "write", "f16"),
        slow("full", forked, shift, "read", "f16"),
        slow("full", plain, shift, "write", "bf16"),
        slow("full", plain, settled_shift, "write", "f32"),
        full("full", plain, shift, "read", "f32"),
    ],
)
def test_to_the_bit(tmp_path, model, history, between, rope, row_type):
    runtime = open_runtime(MODELS[model](), rope=rope, type_k=row_type, type_v=row_type)
    goes_on(runtime, tmp_path / "x.kv", history, between=between)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
def test_after_context_shifts(tmp_path, rope):
    runtime = open_runtime(MODELS["full"](), rope=rope, shifts=True)
    goes_on(runtime, tmp_path / "x.kv", dropped)
    assert runtime.stats().n_shift > 0
    said = session.read_manifest(tmp_path / "x.kv")
    assert said.policy == {"name": "ContextShift", "n_keep": 2} and said.exact == {0: 2}


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
def test_after_self_extend(tmp_path, rope):
    runtime = open_runtime(MODELS["full"](), rope=rope, self_extend=EXTEND)
    goes_on(runtime, tmp_path / "x.kv", plain)
    assert runtime.stats().n_extend > 0


@pytest.mark.parametrize(
    ("model", "history"),
    [
        slow("recurrent, window", plain),
        slow("recurrent, full", plain),
        slow("recurrent", forked),
    ],
)
def test_recurrent_layers(tmp_path, model, history):
    runtime = open_runtime(MODELS[model](), n_rs_seq=2)
    goes_on(runtime, tmp_path / "x.kv", history)
    assert runtime.can_remove(0, runtime.seq_pos_max() - 1)


@pytest.mark.slow
def test_draws_go_on_with_their_random_numbers(tmp_path):
    sampling = Sampling(temp=1.0, seed=7, repeat_penalty=1.3)
    goes_on(open_runtime(MODELS["full"]()), tmp_path / "x.kv", plain, sampling=sampling)


@pytest.mark.slow
def test_logits_go_along(tmp_path):
    runtime = open_runtime(MODELS["full"]())
    runtime.append(tokens(12))
    session.save(tmp_path / "x.kv", runtime.snapshot())
    other = open_runtime(MODELS["full"]())
    other.restore(session.read(tmp_path / "x.kv"))
    assert ids(other.generate(5)) == ids(runtime.generate(5))


PROCESS = """
import sys
from histories import MODELS, open_runtime
from kvrt import session
from kvrt.runtime.generate import After
found = session.read(sys.argv[1])
runtime = open_runtime(MODELS["full, window"]())
runtime.restore(found)
after = After(token=found.draws[0].token, n_sampled=found.draws[0].n_drawn)
print(*(t.id for t in runtime.generate(int(sys.argv[2]), after=after)))
"""


@pytest.mark.slow
def test_in_another_process(tmp_path, monkeypatch):
    runtime = open_runtime(MODELS["full, window"]())
    plain(runtime)
    begun = ids(runtime.generate(N))
    draw = session.SamplingState(token=begun[-1], n_drawn=N, sampling={})
    session.save(tmp_path / "x.kv", runtime.snapshot({0: draw}))
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    command = [sys.executable, "-c", PROCESS, tmp_path / "x.kv", str(M)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rest = ids(runtime.generate(M, after=After(token=begun[-1], n_sampled=N)))
    assert done.stdout.split() == [str(t) for t in rest]


# --- into another runtime ------------------------------------------------------------------------


def logits_after(runtime, seq_id, extra):
    return np.asarray(runtime.append(extra, seq_id))


@pytest.mark.parametrize(
    ("model", "there"),
    [
        ("full", {"n_ctx": 100, "block_size": 32}),
        slow("full, window", {"n_ctx": 200, "n_ubatch": 4}),
        slow("full, window", {"swa_full": True}),
        slow("full, window", {"n_ctx": 52}),
        slow("recurrent, window", {"n_ctx": 128, "n_seq_max": 1}),
    ],
)
def test_another_size_of_cache(model, there):
    of = MODELS[model]()
    runtime, other = open_runtime(of), open_runtime(of, **there)
    runtime.append(tokens(50))
    other.restore(runtime.snapshot())
    np.testing.assert_array_equal(other.token_history(0), runtime.token_history(0))
    assert other.resume_positions(0).earliest == runtime.resume_positions(0).earliest
    a, b = (logits_after(r, 0, [3]) for r in (other, runtime))
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
def test_a_full_window_into_rows_that_are_used_again():
    of = MODELS["full, window"]()
    runtime, other = open_runtime(of, swa_full=True), open_runtime(of)
    runtime.append(tokens(50))
    other.restore(runtime.snapshot())
    assert other.resume_positions(0).earliest == 50 and runtime.resume_positions(0).earliest == 0
    a, b = (logits_after(r, 0, [3, 4, 5]) for r in (other, runtime))
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["full", "full, window", "recurrent, window"])
def test_one_sequence_into_a_busy_runtime(model):
    of = MODELS[model]()
    runtime, other = open_runtime(of), open_runtime(of, n_ctx=96)
    runtime.append(tokens(20))
    runtime.append(tokens(18, seed=4), 1)
    other.append(tokens(15, seed=5), 0)
    other.append(tokens(4, seed=6), 2)
    alone = open_runtime(of)
    alone.append(tokens(15, seed=5), 0)
    other.restore(runtime.snapshot(), {1: 2})
    assert other.token_history(2)[1].tolist() == tokens(18, seed=4)
    assert ids(other.generate(4, 2)) == ids(runtime.generate(4, 1))
    np.testing.assert_allclose(logits_after(other, 0, [1]), logits_after(alone, 0, [1]), atol=1e-4)


@pytest.mark.slow
def test_rows_of_another_type_only_when_asked():
    of = MODELS["full"]()
    runtime, other = open_runtime(of), open_runtime(of, type_k="bf16", type_v="f16")
    runtime.append(tokens(30))
    other.append([1, 2])
    before = other.token_history(0)[1].tolist()
    with pytest.raises(errors.SessionMismatch, match="type_k is f32 in the session and bf16 here"):
        other.restore(runtime.snapshot())
    assert other.token_history(0)[1].tolist() == before
    other.restore(runtime.snapshot(), convert=True)
    a, b = (logits_after(r, 0, [3]) for r in (other, runtime))
    np.testing.assert_allclose(a, b, atol=0.1)


@pytest.mark.slow
def test_a_value_that_a_type_cannot_hold_is_refused_before_anything_is_written():
    of = MODELS["full"]()
    runtime, other = open_runtime(of), open_runtime(of, type_k="f16", type_v="f16")
    runtime.append(tokens(30))
    other.append([1, 2])
    taken = runtime.snapshot()
    (part,) = taken.groups
    blocks = [dataclasses.replace(b, k=np.asarray(b.k) * np.float32(1e8)) for b in part.blocks]
    taken = dataclasses.replace(taken, groups=(dataclasses.replace(part, blocks=blocks),))
    before = other.snapshot()
    with pytest.raises(errors.UsageError, match="which f16 cannot hold"):
        other.restore(taken, convert=True)
    equal(other.snapshot(), before)


MISMATCHES = {
    "rope is write in the session and read here": {"rope": "read"},
    "self_extend": {"self_extend": EXTEND},
}


@pytest.mark.parametrize("message", MISMATCHES)
def test_another_cache_is_refused(message):
    of = MODELS["full"]()
    runtime, other = open_runtime(of), open_runtime(of, **MISMATCHES[message])
    runtime.append(tokens(5))
    with pytest.raises(errors.SessionMismatch, match=message):
        other.restore(runtime.snapshot())
    assert other.seq_pos_max() == -1


def test_another_model_of_equal_shape_is_refused():
    runtime, other = open_runtime(MODELS["full"]()), open_runtime(type(MODELS["full"]())(seed=1))
    runtime.append(tokens(5))
    with pytest.raises(errors.SessionMismatch, match="weights"):
        other.restore(runtime.snapshot())


def test_too_few_cells_leave_everything_as_it_was():
    of = MODELS["full, window"]()
    runtime, other = open_runtime(of), open_runtime(of, n_ctx=32)
    runtime.append(tokens(50))
    other.append([1, 2, 3])
    with pytest.raises(errors.CacheFull, match="the session needs 50 cells, 32 of 32 are free"):
        other.restore(runtime.snapshot())
    assert other.token_history(0)[1].tolist() == [1, 2, 3]
    with pytest.raises(errors.BadSequence, match="sequence 4 is not in the session"):
        other.restore(runtime.snapshot(), {4: 0})
    with pytest.raises(errors.BadSequence, match="raise n_seq_max"):
        other.restore(runtime.snapshot(), {0: 3})


def test_a_snapshot_does_not_change_with_the_runtime():
    runtime = open_runtime(MODELS["full, window"]())
    runtime.append(tokens(20))
    taken = runtime.snapshot()
    before = [np.array(x) for x in leaves(taken)]
    runtime.seq_rm(0, 15)
    runtime.append(tokens(20, seed=8))
    for x, y in zip(before, leaves(taken), strict=True):
        np.testing.assert_array_equal(x, y)

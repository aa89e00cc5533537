"""One sequence of a session is written; the others stay to the bit, whatever the cache is."""

import numpy as np
import pytest
from samples import SAMPLES, WINDOW, Sample, both, open_runtime, tokens, vars_of

from kvrt import Sampling, SelfExtend, session
from kvrt.errors import BadSequence, SessionMismatch
from kvrt.session import io
from kvrt.session.change import sequences
from kvrt.session.change.sequences import save_sequence, with_sequence
from tests.toys import HybridLm, ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

assert WINDOW
CHECKPOINTS = {"n_checkpoints": 4, "checkpoint_interval": 8}
KINDS = {
    **{name: SAMPLES[name] for name in SAMPLES if name != "sequences"},
    "extend_paper_write": Sample(
        ToyLm, {"self_extend": SelfExtend(ga_n=2, ga_w=8, kind="paper"), "type_k": "int8"}
    ),
    "window_checkpoints": Sample(both, CHECKPOINTS),
    "recurrent_checkpoints": Sample(HybridLm, CHECKPOINTS),
}
FAST = ("f32", "recurrent_checkpoints")
DRAW = session.SamplingState(token=3, n_drawn=6, sampling=vars_of(Sampling(temp=0.5, seed=2)))


def several(sample):
    """A snapshot of three sequences, of which two share a beginning, and one is sampled."""
    runtime = open_runtime(sample)
    runtime.append(tokens(11))
    runtime.seq_cp(0, 1)
    runtime.append(tokens(5, seed=1), 1)
    runtime.append(tokens(7, seed=2), 2)
    return runtime.snapshot({1: DRAW})


def lone(sample, n=14):
    """A runtime that has one sequence alone."""
    runtime = open_runtime(sample)
    runtime.append(tokens(n, seed=7))
    return runtime


def bits(kv, at):
    names = ("data", "scale", "zero_point")
    parts = (
        [getattr(kv, x) for x in names if getattr(kv, x) is not None]
        if hasattr(kv, "scale")
        else [kv]
    )
    return [np.asarray(x)[:, at].tobytes() for x in parts]


def content(found, s):
    """All that a snapshot says of a sequence, in a form that compares to the bit."""
    out = []
    for part in found.groups:
        owned = (part.seqs[:, s // 32] >> (s % 32)) & 1 if s // 32 < part.seqs.shape[1] else []
        cells = np.flatnonzero(owned)
        cells = cells[np.argsort(part.pos[cells], kind="stable")]
        rows = [
            bits(kv, c % 256) for c in cells for b in [part.blocks[c // 256]] for kv in (b.k, b.v)
        ]
        out += [part.pos[cells].tolist(), rows, part.lost.get(s)]
    if found.states is not None:
        held = found.states.held.get(s, ())
        states = [
            [np.asarray(t)[at].tobytes() for x in found.states.tables for t in x] for _, at in held
        ]
        out += [[pos for pos, _ in held], states]
    entries = np.concatenate(found.history.pieces.get(s, (np.zeros((3, 0), int),)), axis=1)
    out += [entries[:2].tolist(), found.history.exact.get(s), found.ga_i.get(s), found.draws.get(s)]
    logits = found.logits.get(s)
    out += [logits and (logits[0], np.asarray(logits[1]).tobytes()), s in found.in_blocks]
    points = [c for c in found.checkpoints if s in c.seq_ids]
    tails = [
        [t and (t.pos.tolist(), [bits(b.k, slice(None)) for b in t.blocks]) for t in c.tails]
        for c in points
    ]
    arrays = [[np.asarray(a).tobytes() for x in c.state or () for a in x] for c in points]
    return [*out, [c.pos for c in points], tails, arrays]


# Folders hold the same arrays, so that a few kinds do for them.
@pytest.mark.parametrize(
    ("name", "container"),
    [
        *(pytest.param(n, "file", marks=() if n in FAST else pytest.mark.slow) for n in KINDS),
        *(pytest.param(n, "folder", marks=pytest.mark.slow) for n in FAST),
    ],
)
def test_the_others_stay_to_the_bit(name, container, tmp_path):
    sample, path = KINDS[name], tmp_path / "x.kv"
    before, mine = several(sample), lone(sample).snapshot({0: DRAW})
    session.save(path, before, container)
    before = session.read(path)
    held = {s: content(before, s) for s in before.seq_ids}
    for seq_id in (1, 0, 40):
        save_sequence(path, mine, seq_id)
        after, held[seq_id] = session.read(path), content(mine, 0)
        assert {s: content(after, s) for s in after.seq_ids} == held
    # A file that grew so is one that any runtime restores, sequence by sequence.
    for s in after.seq_ids:
        fresh, old = open_runtime(sample), open_runtime(sample)
        fresh.restore(after, {s: 0})
        old.restore(before if s == 2 else mine, {2 if s == 2 else 0: 0})
        a, b = ([t.id for t in x.generate(4)] for x in (fresh, old))
        assert a == b


def test_a_sequence_that_is_saved_again_and_again_takes_no_more(tmp_path):
    sample, path = KINDS["f32"], tmp_path / "x.kv"
    session.save(path, several(sample))
    seen = set()
    for i in range(6):
        save_sequence(path, lone(sample).snapshot(), i % 2)
        found = session.read(path)
        seen.add((found.groups[0].n_cells, len(found.groups[0].pos), found.history.n_marks))
        assert (
            found.history.n_marks
            == sum(
                len({*np.concatenate(x, axis=1)[2].tolist()}) for x in found.history.pieces.values()
            )
            or i == 0
        )
    assert len(seen) <= 2, seen


@pytest.mark.slow
def test_sequences_of_several_blocks(tmp_path):
    sample = Sample(SAMPLES["f32"].model, {"n_ctx": 2048, "n_ubatch": 256, "block_size": 256})
    path, held = tmp_path / "x.kv", {}
    for s, n in ((0, 300), (3, 513), (1, 256), (0, 700), (3, 20)):
        held[s] = lone(sample, n).snapshot()
        save_sequence(path, held[s], s)
        found = session.read(path)
        assert all(content(found, s) == content(x, 0) for s, x in held.items())


def test_what_others_write_meanwhile_stays(tmp_path, monkeypatch):
    sample, path = KINDS["f32"], tmp_path / "x.kv"
    session.save(path, several(sample))
    theirs, mine, asked = lone(sample, 21).snapshot(), lone(sample).snapshot(), []
    read = io.read

    def slow(held):
        found = read(held)
        if not asked:
            asked.append(held)
            with monkeypatch.context() as patch:
                patch.setattr(sequences.io, "read", read)
                save_sequence(path, theirs, 2)
        return found

    monkeypatch.setattr(sequences.io, "read", slow)
    save_sequence(path, mine, 1)
    found = read(path)
    assert asked and content(found, 2) == content(theirs, 0)
    assert content(found, 1) == content(mine, 0) and found.seq_ids == (0, 1, 2)


@pytest.mark.slow
def test_what_is_refused_changes_nothing(tmp_path):
    path = tmp_path / "x.kv"
    session.save(path, several(KINDS["f32"]))
    data, mine = path.read_bytes(), lone(KINDS["f32"]).snapshot()
    with pytest.raises(SessionMismatch):
        save_sequence(path, lone(KINDS["int8"]).snapshot(), 1)
    with pytest.raises(BadSequence, match="sequence 4096; ids of a session are 0 to 4095"):
        save_sequence(path, mine, 4096)
    with pytest.raises(BadSequence, match="no sequence 0 to save"):
        with_sequence(None, 1, open_runtime(KINDS["f32"]).snapshot())
    assert path.read_bytes() == data

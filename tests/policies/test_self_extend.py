"""SelfExtend in the cache: llama.cpp's worked cases, and where each token must stand."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, ContextShift, GroupSpec, MaskSpec, RopeSpec, Runtime, SelfExtend
from kvrt import cells as kc
from kvrt.errors import BadConfig, CacheFull
from kvrt.policies import SeqCounts
from kvrt.policies.self_extend import ExtendSchedule
from kvrt.store import rope as rotation
from tests.toys import RowModel, allclose

pytestmark = pytest.mark.usefixtures("numpy_device")

N_CTX = 64


def extended(cells, n_done, n_gone, extend):
    """Cells after the rounds that are due, positions that went so far, and rounds."""
    if extend.ga_n == 1:
        return cells, 0, 0
    due = ExtendSchedule(extend=extend, n_step=1).due(SeqCounts(0, 0, n_done, n_gone))
    for edit in due.edits:
        cells = kc.apply(cells, edit)
    return cells, n_gone + due.n_gone, len(due.divided)


def play(n_tokens, extend):
    """Cells of one sequence that is extended before each token; positions gone; how often."""
    cells, n_gone, rounds = kc.create(N_CTX, 2), 0, 0
    for i in range(n_tokens):
        cells, n_gone, n = extended(cells, i, n_gone, extend)
        rounds += n
        pos = np.array([kc.seq_pos_max(cells, 0) + 1], np.int32)
        cells = kc.place(cells, np.array([i], np.int32), pos, np.zeros(1, np.int32))
    return cells, n_gone, rounds


def expected(n_tokens, extend):
    """Token t stands at floor(t / n) once grouped; the others follow, one position each."""
    n, w = extend.ga_n, extend.ga_w
    grouped = 0
    for _ in range(n_tokens):
        # A round comes when w tokens stand alone, just before the next one.
        if _ >= grouped + w:
            grouped += w
    tail = grouped // n + np.arange(n_tokens - grouped)
    return np.concatenate([np.arange(grouped) // n, tail]).astype(np.int32)


def test_the_worked_case():
    extend = SelfExtend(ga_n=2, ga_w=4)
    cells, n_gone, _ = play(8, extend)
    assert cells.pos[:8].tolist() == [0, 0, 1, 1, 2, 3, 4, 5] and n_gone == 2
    assert ExtendSchedule(extend=extend, n_step=1).ga_i(n_gone) == 2
    cells, n_gone, rounds = extended(cells, 8, n_gone, extend)
    assert cells.pos[:8].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (n_gone, rounds) == (4, 1)
    cells, n_gone, rounds = play(12, extend)
    assert cells.pos[:12].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7]
    assert (n_gone, rounds) == (4, 2)


@pytest.mark.parametrize(("n", "w"), [(2, 4), (3, 6), (4, 8), (1, 5)])
def test_every_token_stands_where_the_formula_says(n, w):
    extend = SelfExtend(ga_n=n, ga_w=w)
    for n_tokens in (1, w, w + 1, 2 * w + 1, 50):
        cells, _, _ = play(n_tokens, extend)
        want = np.arange(n_tokens) if n == 1 else expected(n_tokens, extend)
        assert cells.pos[:n_tokens].tolist() == want.tolist()
        # Whatever the path, a key turns by new - old: it was written where it then stood.
        written = cells.pos[:n_tokens] - cells.delta[:n_tokens]
        assert (written >= cells.pos[:n_tokens]).all()


# SmolLM2's base: with 100 an angle of 700 radians is itself uncertain by 5e-5 in float32.
GROUP = GroupSpec(layers=(0,), n_kv_heads=2, head_dim=8, rope=RopeSpec(n_rot=8, base=1e5))


def runtime(extend, mode, n_ctx, **change):
    config = CacheConfig(n_ctx=n_ctx, block_size=8, n_ubatch=8, rope=mode, self_extend=extend)
    return Runtime(RowModel(n_vocab=32, group=GROUP), config, **change)


@pytest.mark.parametrize(
    ("n", "w", "n_tokens"),
    [
        (2, 4, 23),
        pytest.param(3, 6, 40, marks=pytest.mark.slow),
        pytest.param(4, 512, 2600, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_keys_are_the_original_ones_turned_to_their_final_positions(mode, n, w, n_tokens):
    extend = SelfExtend(ga_n=n, ga_w=w)
    at = runtime(extend, mode, n_tokens)
    tokens = [(7 * i + 3) % 32 for i in range(n_tokens)]
    # One token at a time, and parts that end wherever they end.
    start = 0
    for size in (1, 1, 3, *[7] * n_tokens):
        if start < n_tokens:
            at.append(tokens[start : start + size])
            start += size
    group = at.programs.spec.layout.groups[0]
    pos = at.cells.pos[:n_tokens]
    assert pos.max() < n_tokens // n + w + 7 and at.stats().n_extend > 0
    keys, _ = at._cache.device.take_kv(0, np.arange(n_tokens, dtype=np.int32))
    raw = np.asarray(RowModel(n_vocab=32).k[...])[tokens]
    spec = group.rope
    cos, sin = rotation.angles(jnp.asarray(rotation.frequencies(spec, n_tokens)), pos)
    turned = rotation.rotate(jnp.asarray(raw), cos, sin, spec.layout)
    assert np.abs(np.asarray(keys[0]) - np.asarray(raw if mode == "read" else turned)).max() < 1e-5
    if mode == "write":
        # A K-shift a round at most, and none between.
        assert at.stats().n_kshift <= at.stats().n_extend


@pytest.mark.slow
def test_both_key_frames_see_the_same():
    tokens = [(5 * i + 1) % 32 for i in range(30)]
    outs = []
    for mode in ("write", "read"):
        at = runtime(SelfExtend(ga_n=2, ga_w=6), mode, 40)
        at.append(tokens)
        outs.append([at.append([t]) for t in (4, 9)] + [t.id for t in at.generate(6, stride=4)])
    allclose(np.concatenate(outs[0][:2]), np.concatenate(outs[1][:2]), 1e-4)
    assert outs[0][2:] == outs[1][2:]


@pytest.mark.slow
def test_a_run_of_many_steps_is_cut_where_a_round_is_due():
    extend, draws = SelfExtend(ga_n=2, ga_w=4), []
    for stride in (1, 16):
        at = runtime(extend, "write", 40)
        at.append([1, 2, 3])
        draws.append([t.id for t in at.generate(24, stride=stride)])
        assert at.cells.pos[:26].tolist() == expected(26, extend).tolist()
    assert draws[0] == draws[1]


def test_a_fork_is_split_before_its_positions_move():
    config = CacheConfig(
        n_ctx=24, n_seq_max=2, block_size=8, n_ubatch=8, self_extend=SelfExtend(ga_n=2, ga_w=4)
    )
    at = Runtime(RowModel(n_vocab=32), config)
    at.append([1, 2, 3, 4])
    at.seq_cp(0, 1)
    before = np.asarray(at.probe([7], 1))
    at.append([5], 0)
    assert sorted(at.cells.pos[kc.owned(at.cells, 0)]) == [0, 0, 1, 1, 2]
    assert sorted(at.cells.pos[kc.owned(at.cells, 1)]) == [0, 1, 2, 3]
    allclose(at.probe([7], 1), before, 1e-5)
    # A copy of a grouped sequence goes on as its original does.
    at.clear()
    at.append([1, 2, 3, 4, 5, 6])
    at.seq_cp(0, 1)
    alone = [np.asarray(at.append([t], s)) for s in (0, 1) for t in (7, 8, 9)]
    allclose(np.concatenate(alone[:3]), np.concatenate(alone[3:]), 1e-5)


def test_no_cell_for_a_split_is_one_line_and_leaves_no_trace():
    config = CacheConfig(
        n_ctx=6, n_seq_max=2, block_size=8, n_ubatch=8, self_extend=SelfExtend(ga_n=2, ga_w=4)
    )
    at = Runtime(RowModel(n_vocab=32), config)
    at.append([1, 2, 3, 4])
    at.seq_cp(0, 1)
    before = at.cells.pos.copy(), at.stats()
    with pytest.raises(CacheFull):
        at.append([5], 0)
    assert (at.cells.pos == before[0]).all() and at.stats() == before[1]


def test_sequences_that_were_cut_or_emptied_begin_again():
    at = runtime(SelfExtend(ga_n=2, ga_w=4), "read", 40)
    at.append(list(range(20)))
    at.seq_rm(0)
    at.append([1, 2, 3, 4])
    at.append([5, 6])
    used = at.cells.pos[at.cells.pos >= 0]
    assert sorted(used) == [0, 0, 1, 1, 2, 3]
    at.seq_rm(0, 1)  # one group is left, not whole
    at.append([7, 8, 9, 10, 11])
    at.append([12])
    used = at.cells.pos[at.cells.pos >= 0]
    assert sorted(used) == [0, 0, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(ga_n=3, ga_w=4), "ga_w 4 must be a multiple of ga_n 3"),
        (dict(ga_n=0, ga_w=4), "ga_n 0, ga_w 4; at least 1"),
    ],
)
def test_bad_sizes_are_refused(change, words):
    with pytest.raises(BadConfig, match=words):
        SelfExtend(**change)


def test_what_cannot_be_extended_is_refused():
    extend = SelfExtend(ga_n=2, ga_w=4)
    with pytest.raises(BadConfig, match="ContextShift and SelfExtend in the cache both move"):
        runtime(extend, "write", 40, policy=ContextShift())
    group = GroupSpec(
        layers=(0,),
        n_kv_heads=2,
        head_dim=8,
        rope=RopeSpec(n_rot=8),
        mask=MaskSpec(kind="window", size=4),
    )
    with pytest.raises(BadConfig, match="layers that see a window of their own"):
        Runtime(RowModel(group=group), CacheConfig(n_ctx=16, self_extend=extend))
    paper = dict(self_extend=SelfExtend(ga_n=2, ga_w=4, kind="paper"), hadamard=True)
    with pytest.raises(BadConfig, match="SelfExtend as in the paper RoPE comes last"):
        CacheConfig(**paper, type_k="int8")
    assert CacheConfig(**paper, type_v="int8").hadamard


@pytest.mark.slow
def test_reach():
    assert SelfExtend(ga_n=4, ga_w=1024).reach(8192) == 7168 * 4 + 1024

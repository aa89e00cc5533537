"""Models of several groups: windows that roll, recurrences, and both beside full attention."""

import jax
import numpy as np
import pytest

from kvrt import AttentionSinks, CacheConfig, ContextShift, MaskSpec, Runtime, SelfExtend
from kvrt.errors import BadConfig, CannotRewind
from tests.numpy_device.device import compiled
from tests.toys import HybridLm, ToyLm, allclose

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpy_device")]

WINDOW, CHUNKS = MaskSpec(kind="window", size=12), MaskSpec(kind="chunked", size=16)
TEXT = [(7 * i + i // 5) % 32 for i in range(150)]

MODELS = {
    "window": lambda: ToyLm(n_vocab=32, n_layers=2, masks=[MaskSpec(), WINDOW]),
    "chunked": lambda: ToyLm(n_vocab=32, n_layers=2, masks=[CHUNKS, MaskSpec()]),
    "windows alone": lambda: ToyLm(n_vocab=32, n_layers=2, masks=[WINDOW, CHUNKS]),
    "recurrent": HybridLm,
    "recurrent, window": lambda: HybridLm(mask=WINDOW),
    "recurrent alone": lambda: HybridLm(attention=False),
}
BOTH, OTHERS = "recurrent, window", ("chunked", "recurrent alone")
every_model = pytest.mark.parametrize(
    "name", [BOTH, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]
)


def runtime(model, **change):
    config = {"n_ctx": 160, "block_size": 8, "n_ubatch": 16, "n_seq_max": 2, **change}
    return Runtime(model, CacheConfig(**config))


def logits(at, size):
    parts = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    return np.concatenate([at.append(p, out_ids=range(len(p))) for p in parts])


@pytest.fixture(
    scope="module",
    params=[BOTH, "window", *OTHERS],
)
def read_at_once(request):
    """A model, and the logits of the text with room for everything, in few steps."""
    model = MODELS[request.param]()
    at = runtime(model, swa_full=True, n_ubatch=160)
    return model, logits(at, len(TEXT))


@pytest.mark.parametrize("mode", ["write", "read"])
def test_pieces_of_any_size_give_the_same(read_at_once, mode):
    model, expected = read_at_once
    at = runtime(model, rope=mode)
    for size in (1, 7, 64, len(TEXT)):
        at.clear()
        allclose(logits(at, size), expected, 1e-4)
    assert at.stats().cache_bytes < runtime(model, swa_full=True).stats().cache_bytes or (
        not at.group_cells or len(at.group_cells[0].pos) == 160
    )


@every_model
def test_generation_is_the_same_in_runs_of_any_length(name):
    model = MODELS[name]()
    full = runtime(model, swa_full=True)
    full.append(TEXT[:20])
    expected = [t.id for t in full.generate(40)]
    at = runtime(model)
    for stride in (1, 5, 64):
        at.clear()
        at.append(TEXT[:20])
        assert [t.id for t in at.generate(40, stride=stride)] == expected
        # The run was cut short: what came after the stop was never there.
        stop = expected[9]
        at.clear()
        at.append(TEXT[:20])
        n = expected.index(stop) + 1
        assert [t.id for t in at.generate(40, stride=stride, stop_ids=[stop])] == expected[:n]
        assert at.seq_pos_max() == 20 + n - 2
        allclose(at.append(expected[n - 1 : n + 3]), _after(full, expected, n), 1e-4)


def _after(full, ids, n):
    full.clear()
    full.append(TEXT[:20])
    return full.append(ids[: n + 3])


@every_model
def test_two_sequences_share_a_beginning_and_part(name):
    model = MODELS[name]()
    at, alone = runtime(model), runtime(model, swa_full=True, n_seq_max=1)
    at.append(TEXT[:50])
    at.seq_cp(0, 1)
    ends = {0: TEXT[50:90], 1: TEXT[60:100]}
    for a, b in zip(*ends.values(), strict=True):
        out = at.decode({0: a, 1: b})
    for seq, end in ends.items():
        alone.clear()
        alone.append(TEXT[:50])
        allclose(out[seq], alone.append(end)[0], 1e-4)


@every_model
def test_a_probe_changes_nothing(name):
    at = runtime(MODELS[name]())
    at.append(TEXT[:40])
    first = np.asarray(at.probe(TEXT[40:50]))
    np.testing.assert_array_equal(first, at.probe(TEXT[40:50]))
    allclose(at.append(TEXT[40:50], out_ids=range(10)), first, 1e-4)
    assert at.probe(TEXT[:3], 1).shape[0] == 3


@every_model
def test_cutting_back_is_exact_or_refused(name):
    model = MODELS[name]()
    at, full = runtime(model, n_rs_seq=3), runtime(model, swa_full=True)
    at.append(TEXT[:100])
    can = [p for p in range(1, 101) if at.can_remove(0, p)]
    first = at.resume_positions().earliest
    assert [p for p in can if p >= first] == list(range(first, 101))
    assert 50 < first < 100
    # A token that begins a chunk sees nothing before it, lost or not.
    assert [p for p in can if p < first] == ([16, 32, 48] if name == "chunked" else [])
    for p in can:
        at.clear()
        at.append(TEXT[:100])
        at.seq_rm(0, p)
        full.clear()
        full.append(TEXT[:p])
        allclose(at.append(TEXT[5:25]), full.append(TEXT[5:25]), 1e-4)
    at.clear()
    at.append(TEXT[:100])
    before = [x.copy() for c in at.group_cells for x in (c.pos, c.seqs)]
    with pytest.raises(CannotRewind):
        at.seq_rm(0, first - 1)
    after = [x for c in at.group_cells for x in (c.pos, c.seqs)]
    assert all(np.array_equal(*x) for x in zip(before, after, strict=True))
    assert at.seq_pos_max() == 99
    assert at.can_remove(0)
    at.seq_rm(0)
    full.clear()
    allclose(at.append(TEXT[:9]), full.append(TEXT[:9]), 1e-4)


@pytest.mark.parametrize("name", ["window", "chunked"])
def test_a_context_shift_on_small_windows_equals_full_ones(name):
    texts = []
    for swa_full in (False, True):
        config = CacheConfig(n_ctx=96, block_size=8, n_ubatch=16, swa_full=swa_full)
        at = Runtime(MODELS[name](), config, policy=ContextShift(n_keep=4))
        at.append(TEXT[:60])
        texts.append([t.id for t in at.generate(120)])
        assert at.stats().n_shift == 2
    assert texts[0] == texts[1]


@pytest.mark.parametrize("mask", ["window", "chunked"])
def test_a_shift_that_leaves_less_than_a_window_equals_one_that_keeps_all(mask):
    """30 of 60 go at once behind the sinks: the window of 40 sees the sinks again, still there."""
    found = []
    for swa_full in (False, True):
        masks = [MaskSpec(), MaskSpec(kind=mask, size=40)]
        model = ToyLm(n_vocab=32, n_layers=2, masks=masks)
        config = CacheConfig(n_ctx=96, block_size=8, n_ubatch=16, swa_full=swa_full)
        at = Runtime(model, config, policy=AttentionSinks(n_sink=4, n_window=60, n_drop=30))
        assert at.group_cells[1].pos.shape == ((96 if swa_full else 64),)
        at.append(TEXT[:64])
        found.append([at.append(TEXT[i : i + 2]) for i in range(64, 100, 2)])
        assert at.stats().n_shift == 2
    allclose(np.stack(found[0]), np.stack(found[1]), 1e-4)


def test_recurrent_layers_take_no_policy_and_no_moves():
    with pytest.raises(BadConfig, match="the state of recurrent layers cannot forget"):
        Runtime(HybridLm(), CacheConfig(n_ctx=64), policy=ContextShift())
    extend = SelfExtend(ga_n=2, ga_w=4)
    with pytest.raises(BadConfig, match="no positions to divide, for all layers are recurrent"):
        Runtime(MODELS["recurrent alone"](), CacheConfig(n_ctx=64, self_extend=extend))
    at = runtime(HybridLm())
    at.append(TEXT[:20])
    for move in (lambda: at.seq_add(0, 5, None, 3), lambda: at.seq_div(0, 0, None, 2)):
        with pytest.raises(CannotRewind, match="its 20 tokens are one state"):
            move()
    assert at.seq_pos_max() == 19 and not at.group_cells[0].delta.any()


def test_self_extend_moves_a_hybrids_positions_and_leaves_its_newest_state():
    """States have no positions; a round takes older ones, and the checkpoints behind it, away."""
    sizes = dict(n_ctx=96, n_ubatch=8, n_rs_seq=3, n_checkpoints=4, checkpoint_interval=0)
    extend = SelfExtend(ga_n=2, ga_w=8)
    at = Runtime(HybridLm(), CacheConfig(**sizes, self_extend=extend))
    wanted = Runtime(HybridLm(), CacheConfig(n_ctx=96, n_ubatch=8, self_extend=extend))
    for one in (at, wanted):
        one.append(TEXT[:20])
    assert at.seq_pos_max() == 20 - 4 * 2 - 1
    assert at.resume_positions().earliest == 12 - 3
    at.append([7, 8, 9])
    at.seq_rm(0, 12)
    for one in (at, wanted):
        one.append(TEXT[20:50])
    lost = [(c.pos, c.reason) for c in at.stats().lost_checkpoints]
    assert lost == [(15, "cut"), (12, "changed")]
    a, b = (one.last_logits(0) for one in (at, wanted))
    np.testing.assert_array_equal(a, b)
    assert [t.id for t in at.generate(30)] == [t.id for t in wanted.generate(30)]


def test_a_text_of_any_length_runs_where_no_layer_keeps_all():
    for name in ("windows alone", "recurrent alone"):
        at = runtime(MODELS[name](), n_ctx=64, n_seq_max=1)
        n_bytes = at.stats().cache_bytes
        at.append(TEXT)
        n = sum(1 for _ in at.generate(300, stride=16))
        assert n == 300 and at.seq_pos_max() == len(TEXT) + 298
        assert at.stats().cache_bytes == n_bytes and at.n_free == 2**31 - 1


@compiled()
def test_nothing_is_copied_and_nothing_compiles_anew():
    at = runtime(HybridLm(mask=WINDOW), n_seq_max=1)
    at.append(TEXT[:33])
    n = 0
    for i, _ in enumerate(at.generate(100)):
        if i == 2:
            n = at.programs.n_compiles
    assert at.programs.n_compiles == n
    for key, program in at.programs.compiled().items():
        if key[0] in ("forward", "decode_steps"):
            memory = program.memory_analysis()
            assert memory.alias_size_in_bytes >= at.stats().cache_bytes, key


def test_released_states_and_rows_are_scrubbed():
    at = runtime(HybridLm(mask=WINDOW))
    at.append(TEXT[:40])
    at.seq_cp(0, 1)
    at.append(TEXT[:5], 1)
    at.seq_rm(0)
    expected = np.asarray(at.probe([1, 2], 1))
    at.scrub()
    np.testing.assert_array_equal(expected, at.probe([1, 2], 1))
    at.clear()
    at.scrub()
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(at.cache.stores))
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(at.cache.states))

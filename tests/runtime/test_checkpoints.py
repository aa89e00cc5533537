"""Context checkpoints: a sequence cut back to one is, bit by bit, as one only read so far."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, ContextShift, MaskSpec, Runtime
from kvrt.errors import BadConfig, CannotRewind
from kvrt.program.estimate import of_cells
from kvrt.reuse.plan import operations, plan_reuse
from tests.marks import full, slow
from tests.toys import DeltaLm, HybridLm, ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

WINDOW, CHUNKS = MaskSpec(kind="window", size=12), MaskSpec(kind="chunked", size=16)
TEXT = [(7 * i + i // 5) % 32 for i in range(150)]
OTHER = [(5 * i + 3) % 32 for i in range(40)]

MODELS = {
    "window": lambda: ToyLm(n_vocab=32, n_layers=2, masks=[MaskSpec(), WINDOW]),
    "windows alone": lambda: ToyLm(n_vocab=32, n_layers=2, masks=[WINDOW, CHUNKS]),
    "recurrent, window": lambda: HybridLm(mask=WINDOW),
    "recurrent alone": lambda: HybridLm(attention=False),
    "delta": DeltaLm,
}


every_model = pytest.mark.parametrize("name", MODELS)


def runtime(model, **change):
    config = {"n_ctx": 208, "block_size": 8, "n_ubatch": 16, "n_seq_max": 2}
    config |= {"n_checkpoints": 32, "checkpoint_interval": 20, **change}
    return Runtime(model, CacheConfig(**config))


def same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def leaves(kept):
    """The arrays of keys, values and states of a checkpoint."""
    tails = [(block.k, block.v) for tail in kept.tails if tail for block in tail.blocks]
    return jax.tree.leaves((tails, kept.state))


@pytest.mark.parametrize(
    "name",
    [
        "recurrent, window",
        slow("window"),
        slow("windows alone"),
        slow("recurrent alone"),
        slow("delta"),
    ],
)
def test_resuming_at_each_checkpoint_equals_a_fresh_read(name):
    model = MODELS[name]()
    at, fresh = runtime(model), runtime(model)
    at.append(TEXT)
    assert at.checkpoints() == (20, 40, 60, 80, 100, 120, 140, 150)
    assert at.resume_positions().earliest > 100
    # Downwards, so that each cut but the first begins where the one before it has written.
    for pos in (140, 100, 40, 20):
        assert at.can_remove(0, pos)
        at.seq_rm(0, pos)
        assert at.checkpoints() == tuple(range(20, pos + 1, 20)) and at.seq_pos_max() == pos - 1
        same_bits(at.token_history()[1], TEXT[:pos])
        fresh.clear()
        fresh.append(TEXT[:pos])
        same_bits(at.append(OTHER, out_ids=range(40)), fresh.append(OTHER, out_ids=range(40)))
        for token in (3, 4, 5):
            same_bits(at.decode({0: token})[0], fresh.decode({0: token})[0])
    assert at.stats().n_rewinds >= 3 and at.stats().n_recomputed == 0


@pytest.mark.slow
@every_model
def test_a_cut_between_checkpoints_evaluates_less_than_an_interval(name):
    model = MODELS[name]()
    at, fresh = runtime(model), runtime(model)
    at.append(TEXT)
    at.seq_rm(0, 93)
    assert at.stats().n_recomputed == 13 and at.seq_pos_max() == 92
    fresh.append(TEXT[:80])
    fresh.append(TEXT[80:93])
    assert at.checkpoints() == (20, 40, 60, 80, 93)
    same_bits(at.last_logits(0), fresh.last_logits(0))
    same_bits(at.append(OTHER), fresh.append(OTHER))


@pytest.mark.slow
@every_model
def test_before_the_first_checkpoint_a_cut_is_refused_and_changes_nothing(name):
    at = runtime(MODELS[name]())
    at.append(TEXT)
    before = at.checkpoints(), at.seq_pos_max()
    assert not at.can_remove(0, 19)
    with pytest.raises(CannotRewind):
        at.seq_rm(0, 19)
    assert (at.checkpoints(), at.seq_pos_max()) == before


def test_sequences_share_checkpoints_and_cut_back_apart():
    model = MODELS["recurrent, window"]()
    at, fresh = runtime(model), runtime(model)
    at.append(TEXT[:70])
    at.seq_cp(0, 1, 0, 70)
    at.append(OTHER, 1)
    n, n_bytes = at.stats().n_checkpoints, at.stats().checkpoint_bytes
    assert at.checkpoints(0) == (20, 40, 60, 70) and at.checkpoints(1)[:4] == (20, 40, 60, 70)
    assert n == 4 + len(at.checkpoints(1)[4:]) and n_bytes == n * (n_bytes // n)
    at.seq_rm(0, 40)
    assert at.checkpoints(1)[:4] == (20, 40, 60, 70)
    at.seq_rm(1, 60)
    fresh.append(TEXT[:60])
    # Both hold cells by now, so the order of summation may be another one.
    out = at.append(OTHER, 1, out_ids=range(40))
    np.testing.assert_allclose(out, fresh.append(OTHER, out_ids=range(40)), atol=1e-5)
    at.seq_keep(1)
    assert at.checkpoints(0) == ()


def test_what_is_changed_before_a_checkpoint_drops_it_and_stats_say_so():
    at = runtime(MODELS["window"]())
    at.append(TEXT)
    at.seq_rm(0, 50, 60)
    assert at.checkpoints() == (20, 40)
    lost = at.stats().lost_checkpoints
    assert [x.pos for x in lost] == [60, 80, 100, 120, 140, 150]
    assert {x.reason for x in lost} == {"changed"}
    at.seq_add(0, 60, None, -10)
    assert at.checkpoints() == (20, 40)
    at.seq_add(0, 30, None, 1)
    assert at.checkpoints() == (20,)
    at.seq_rm(0, 20)
    assert at.seq_pos_max() == 19 and at.checkpoints() == (20,)


def test_their_number_and_bytes_are_bounded():
    model = HybridLm(mask=WINDOW)
    at = runtime(model, n_checkpoints=3, checkpoint_interval=16)
    at.append(TEXT)
    assert len(at.checkpoints()) == 3 and at.checkpoints()[-1] == 150
    one = at.stats().checkpoint_bytes // 3
    assert {x.reason for x in at.stats().lost_checkpoints} == {"evicted"}
    two = runtime(model, checkpoint_interval=16, checkpoint_bytes=2 * one)
    two.append(TEXT[:80])
    two.append(TEXT[:80], 1)
    assert two.stats().checkpoint_bytes == 2 * one
    assert two.checkpoints(1)[-1] == 80
    config = dataclasses.replace(at.config, n_seq_max=1)
    assert of_cells(model.groups, model.recurrent, config).checkpoint_bytes == 3 * one
    assert of_cells(model.groups, model.recurrent, two.config).checkpoint_bytes == 2 * one
    kept = two._cache.host.checkpoints.unique
    assert sum(x.nbytes for c in kept for x in leaves(c)) == 2 * one


@pytest.mark.slow
def test_an_insertion_in_a_long_prompt_reuses_what_lies_before_it():
    """A window in every layer but one, as in Gemma 3; without checkpoints nothing is reused."""
    masks = [MaskSpec(kind="window", size=64), MaskSpec()]
    model = ToyLm(n_vocab=32, n_layers=2, masks=masks)
    sizes = {"n_ctx": 1280, "block_size": 64, "n_ubatch": 64, "n_seq_max": 1}
    old = [(7 * i + i // 11) % 32 for i in range(1127)]
    new = [*old[:321], (old[321] + 1) % 32, *old[321:]]
    for n_checkpoints, n_reused in ((0, 0), (32, 320)):
        at = Runtime(model, CacheConfig(**sizes, n_checkpoints=n_checkpoints))
        at.append(old)
        plan = plan_reuse(at.token_history(), new, at=at.resume_positions())
        assert plan.n_reused == n_reused
    cut, last = operations(plan)
    at.seq_rm(0, cut.p0)
    fresh = Runtime(model, CacheConfig(**sizes, n_checkpoints=32))
    same_bits(at.append(new[last.start :]), fresh.append(new))


def test_a_prompt_that_ends_otherwise_evaluates_one_interval_at_most():
    model = HybridLm(mask=WINDOW)
    at = runtime(model)
    at.append(TEXT)
    for n in (149, 137, 100, 45, 21):
        plan = plan_reuse(at.token_history(), [*TEXT[:n], 31, 30], at=at.resume_positions())
        assert 0 <= n - plan.n_prefix < 20, n


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_checkpoints": -1}, "n_checkpoints is -1; it must not be negative"),
        ({"n_checkpoints": 0}, "checkpoint_interval is 20 without checkpoints; set n_checkpoints"),
        ({"checkpoint_interval": 15}, "is 15 tokens, a step runs n_ubatch = 16"),
        ({"checkpoint_interval": -1}, "checkpoint_interval is -1; it must not be negative"),
        ({"checkpoint_bytes": -1}, "checkpoint_bytes is -1; it must not be negative"),
        ({"checkpoint_bytes": 1000}, "checkpoint_bytes is 1,000, one checkpoint of this model"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused_when_it_is_made(change, message):
    with pytest.raises(BadConfig) as error:
        runtime(MODELS["window"](), **change)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_where_every_layer_keeps_all_none_is_made():
    at = runtime(ToyLm(n_vocab=32))
    at.append(TEXT[:50])
    assert at.checkpoints() == () and at.stats().checkpoint_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "recurrent, window"])
def test_random_histories_equal_text_read_from_scratch(name):
    model = MODELS[name]()
    at = runtime(model, n_ctx=512, n_checkpoints=4, checkpoint_bytes=50_000)
    whole = Runtime(model, CacheConfig(n_ctx=512, n_ubatch=256, swa_full=True))
    rng, texts = np.random.default_rng(5), {0: [], 1: []}
    for _ in range(150):
        s = int(rng.integers(2))
        ids, kind = texts[s], rng.choice(["append", "append", "decode", "cut", "copy", "clear"])
        if kind == "append" and len(ids) < 200:
            new = rng.integers(0, 32, int(rng.integers(1, 50))).tolist()
            at.append(new, s)
            ids += new
        elif kind == "decode" and ids:
            at.decode({s: 3})
            ids.append(3)
        elif kind == "cut" and ids:
            p0 = int(rng.integers(len(ids)))
            if at.can_remove(s, p0):
                at.seq_rm(s, p0)
                del ids[p0:]
            else:
                assert at.resume_positions(s).nearest(p0) == 0
        elif kind == "copy":
            at.seq_rm(1 - s)
            at.seq_cp(s, 1 - s)
            texts[1 - s] = list(ids)
        elif kind == "clear" and rng.random() < 0.3:
            at.seq_rm(s)
            ids.clear()
        assert at.token_history(s)[1].tolist() == ids
        assert len(at.checkpoints(s)) <= 4 and at.stats().checkpoint_bytes <= 50_000
        whole.clear()
        expected = whole.append([*ids, 1])
        np.testing.assert_allclose(at.probe([1], s), expected, atol=1e-4, rtol=1e-4)
    assert at.stats().n_rewinds > 10 and at.stats().n_recomputed > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"rope": "read", "type_k": "int8", "type_v": "int4"},
        full({"type_k": "bf16", "type_v": "f16"}),
        {"type_k": "q8_0", "type_v": "q8_0", "hadamard": True},
    ],
)
def test_every_kv_dtype_comes_back_as_it_was(change):
    model = ToyLm(n_vocab=32, n_layers=2, head_dim=32, masks=[MaskSpec(), WINDOW])
    at, fresh = runtime(model, **change), runtime(model, **change)
    at.append(TEXT)
    at.seq_rm(0, 60)
    fresh.append(TEXT[:60])
    same_bits(at.append(OTHER, out_ids=range(40)), fresh.append(OTHER, out_ids=range(40)))


@pytest.mark.slow
def test_keys_by_channel_come_back_as_float16_and_are_quantized_again():
    """The newest 96 as they were, older ones within half a step of the type of their channel."""
    windows = [MaskSpec(), MaskSpec(kind="window", size=160)]
    model = ToyLm(n_vocab=32, n_layers=2, head_dim=32, masks=windows)
    sizes = {"n_ctx": 512, "block_size": 32, "n_ubatch": 32, "checkpoint_interval": 64}
    at = runtime(model, type_k="kivi4", n_seq_max=1, **sizes)
    at.append(np.random.default_rng(0).integers(0, 32, 400).tolist())
    kept = next(c.tails[1] for c in at.snapshot().checkpoints if c.pos == 320)
    at.seq_rm(0, 320)
    again = at.snapshot().groups[1]
    pos, old = by_position(kept, [block.k for block in kept.blocks])
    found, new = by_position(again, [block.k for block in again.blocks])
    n = len(pos)
    assert n >= 159 and at.stats().n_rewinds == 1
    same_bits(found[-n:], pos)
    same_bits(new[-96:], old[-96:])
    step = np.ptp(old, axis=0) / 15
    differs = np.abs(new[-n:].astype(np.float32) - old.astype(np.float32))
    assert 0 < differs.max() and np.all(differs <= step / 2 + 5e-3)


def by_position(cells, keys):
    """Positions of cells in their order, and their keys [n, L, H, D]."""
    order = np.argsort(cells.pos)
    keys = np.concatenate([np.asarray(x) for x in keys], 1)
    return cells.pos[order], np.moveaxis(keys, 1, 0)[: len(cells.pos)][order]


@pytest.mark.slow
def test_a_sequence_in_blocks_resumes_in_its_blocks():
    model = MODELS["window"]()
    at, fresh = runtime(model), runtime(model)
    for x in (at, fresh):
        x.append(TEXT[:60])
        x.to_blocks(0)
    at.append(TEXT[60:])
    at.seq_rm(0, 70)
    fresh.append(TEXT[60:70])
    np.testing.assert_allclose(at.append(OTHER), fresh.append(OTHER), atol=1e-5)
    assert at.table(0)[0] == fresh.table(0)[0]


@pytest.mark.slow
def test_a_context_shift_keeps_those_of_what_it_keeps():
    model = ToyLm(n_vocab=32, n_layers=2, masks=[MaskSpec(), WINDOW])
    config = CacheConfig(n_ctx=96, block_size=8, n_ubatch=16, n_checkpoints=8)
    at = Runtime(model, config, policy=ContextShift(n_keep=40))
    at.append(TEXT[:90])
    assert at.checkpoints() == (16, 32, 48, 64, 80, 90)
    at.append(TEXT[90:110])
    assert at.stats().n_shift == 1 and at.checkpoints()[:2] == (16, 32)
    lost = [(x.pos, x.reason) for x in at.stats().lost_checkpoints]
    assert lost == [(48, "changed"), (64, "changed"), (80, "changed"), (90, "changed")]
    at.seq_rm(0, 32)
    fresh = Runtime(model, config)
    fresh.append(TEXT[:32])
    same_bits(at.append(OTHER), fresh.append(OTHER))


MESH = """
import numpy as np
from test_checkpoints import MODELS, OTHER, TEXT
from kvrt import CacheConfig, MeshSpec, Runtime
types = {"type_k": "f32", "type_v": "f32"}
config = CacheConfig(n_ctx=208, block_size=8, n_ubatch=16, n_checkpoints=32, **types)
model = MODELS["recurrent, window"]()
at, fresh = (Runtime(model, config, mesh=MeshSpec(context=2)) for _ in range(2))
at.append(TEXT)
at.seq_rm(0, 64)
fresh.append(TEXT[:64])
np.testing.assert_array_equal(at.append(OTHER), fresh.append(OTHER))
assert at.stats().n_rewinds == 1
"""


@pytest.mark.slow
def test_devices_of_a_mesh_resume_together():
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", MESH], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

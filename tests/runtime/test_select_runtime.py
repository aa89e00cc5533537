"""Sparse reads in a `Runtime`: labels follow whatever changes keys, and refusals."""

import jax
import numpy as np
import pytest

from kvrt import AttentionSinks, CacheConfig, MaskSpec, MeshSpec, Runtime, Speculation
from kvrt.arrays import array_bytes
from kvrt.attention.select import labels
from kvrt.errors import BadConfig
from kvrt.options.select import DoubleSparsity, Quest
from kvrt.program.labels.arrays import label_plan
from kvrt.runtime.heavy_channels import heavy_channels, read_channels, write_channels
from tests.marks import slow
from tests.toys import ToyLm

TOKENS = np.random.default_rng(0).integers(0, 64, 400).tolist()
QUEST = Quest(n_cells=80, n_dense=1)
CHANNELS = ((((0, 3, 8, 11),) * 2),) * 3
SPARSE = DoubleSparsity(n_cells=80, n_dense=1, channels=CHANNELS)


def runtime_of(select, **rest):
    config = CacheConfig(n_ctx=512, block_size=32, n_ubatch=64, n_seq_max=3, select=select)
    return Runtime(ToyLm(n_layers=3), config, **rest)


rebuilt = jax.jit(labels.rebuild, static_argnums=(0, 1))


def check_labels(runtime):
    """All labels are what the keys of the cells that are held give."""
    logits = runtime.append([1])  # labels what waits for it
    device = runtime._cache.device
    plan, cache = label_plan(device.layout, device.spec.config), runtime.cache
    for i, (kv, cells) in enumerate(zip(cache.stores, cache.cells, strict=True)):
        size = device.layout.stores[i].extent
        blocks = np.arange(size.n_blocks, dtype=np.int32), np.asarray(size.n_blocks, np.int32)
        pos = np.asarray(cells.pos).reshape(size.n_blocks, -1)
        want = rebuilt(plan, i, cache.labels[i], kv, pos, blocks)
        held = pos.reshape(-1, 16).max(1) >= 0
        found = 0
        for got, new in zip(cache.labels[i], want, strict=True):
            if got is None:
                continue
            got, new = np.asarray(got), np.asarray(new)
            at = held if isinstance(plan.select, Quest) else np.repeat(held, 16)
            np.testing.assert_allclose(got[:, :, at], new[:, :, at], atol=1e-6)
            found += 1
        assert found == 2, "the first layer reads all"
    return np.asarray(logits)


@pytest.mark.parametrize("select", [QUEST, slow(SPARSE)], ids=["quest", "double_sparsity"])
def test_labels_follow_writes_removals_moves_and_copies(select):
    runtime = runtime_of(select)
    runtime.prefill(TOKENS[:192])
    check_labels(runtime)
    runtime.seq_rm(0, 30, 70)
    runtime.seq_add(0, 70, None, -40)  # a K-shift
    check_labels(runtime)
    runtime.seq_cp(0, 1)
    runtime.seq_add(1, 40, None, 5)  # splits shared cells
    check_labels(runtime)
    runtime.prefill(TOKENS[200:260], 2)
    runtime.seq_rm(0)
    runtime.prefill(TOKENS[260:324])  # cells are used again
    check_labels(runtime)


@pytest.mark.slow
def test_labels_follow_a_policy_and_a_session(tmp_path):
    runtime = runtime_of(QUEST, policy=AttentionSinks(n_window=200, n_sink=4, n_drop=40))
    runtime.prefill(TOKENS[:300])
    runtime.append(TOKENS[300:350])
    check_labels(runtime)
    snapshot = runtime.snapshot()
    other = runtime_of(QUEST, policy=AttentionSinks(n_window=200, n_sink=4, n_drop=40))
    other.restore(snapshot)
    np.testing.assert_allclose(check_labels(other), check_labels(runtime), atol=1e-5)


@pytest.mark.slow
def test_what_fits_the_budget_is_the_dense_text_and_programs_stay():
    dense, sparse = runtime_of(None), runtime_of(Quest(n_cells=512, n_dense=1))
    for runtime in (dense, sparse):
        runtime.prefill(TOKENS[:128])
    for token in TOKENS[128:148]:
        np.testing.assert_array_equal(dense.append([token]), sparse.append([token]))
    small = runtime_of(QUEST)
    small.prefill(TOKENS[:128])
    small.append([3])
    n = small.programs.n_compiles
    found = [np.asarray(small.append([t])) for t in TOKENS[150:250]]
    assert small.programs.n_compiles == n
    dense.prefill([3], 1)
    assert np.isfinite(found).all()


@pytest.mark.slow
def test_decode_on_the_device_is_that_of_single_steps():
    one, many = runtime_of(QUEST), runtime_of(QUEST)
    texts = []
    for runtime, stride in ((one, 1), (many, 8)):
        runtime.prefill(TOKENS[:128])
        texts.append([t.id for t in runtime.generate(40, stride=stride)])
    assert texts[0] == texts[1]
    check_labels(many)


@pytest.mark.slow
def test_labels_are_bytes_and_no_layer_is_copied():
    runtime, dense = runtime_of(QUEST), runtime_of(None)
    for x in (runtime, dense):
        x.prefill(TOKENS[:100])
        x.append([1])
    size = array_bytes(runtime.cache.labels)
    assert size == 2 * 2 * 2 * 16 * 4 * 512 // 16
    assert runtime.stats().cache_bytes - dense.stats().cache_bytes == size
    assert dense.cache.labels is None
    kinds = {key[0] for key in dense.programs.compiled()}
    assert "relabelled" not in kinds
    assert "relabelled" in {key[0] for key in runtime.programs.compiled()}


def test_heavy_channels_are_found_kept_and_refused_with_other_weights(tmp_path):
    model = ToyLm(n_layers=3)
    pieces = [TOKENS[i : i + 64] for i in range(0, 256, 64)]
    channels, weights = heavy_channels(model, pieces, 4)
    assert [len(layer) for layer in channels] == [2] * 3
    path = str(tmp_path / "channels.json")
    write_channels(path, channels, weights)
    assert read_channels(path) == (channels, weights)
    spec = DoubleSparsity(n_cells=80, channels=channels, weights=weights)
    Runtime(model, CacheConfig(n_ctx=256, select=spec))
    with pytest.raises(BadConfig, match="find them with this model"):
        Runtime(ToyLm(n_layers=3, seed=1), CacheConfig(n_ctx=256, select=spec))
    (tmp_path / "other.json").write_text('{"kind": 1}')
    with pytest.raises(BadConfig, match="name a file of heavy channels"):
        read_channels(str(tmp_path / "other.json"))


def test_what_cannot_be_read_sparsely_is_refused_when_it_is_made():
    config = CacheConfig(n_ctx=512, block_size=32, select=Quest(n_cells=80, n_dense=0))
    windows = ToyLm(masks=[MaskSpec(kind="window", size=64)] * 2)
    with pytest.raises(BadConfig, match="layers that see all"):
        Runtime(windows, config)
    if jax.device_count() > 1:
        with pytest.raises(BadConfig, match="leave mesh out"):
            Runtime(ToyLm(), config, mesh=MeshSpec(context=2))
    with pytest.raises(BadConfig, match="channels of 3 layers"):
        many = DoubleSparsity(n_cells=80, n_dense=0, channels=CHANNELS)
        Runtime(ToyLm(n_layers=4), CacheConfig(n_ctx=512, select=many))
    from kvrt import PromptLookup

    runtime = runtime_of(QUEST)
    runtime.prefill(TOKENS[:50])
    with pytest.raises(BadConfig, match="leave one of them out"):
        list(runtime.generate(4, speculation=Speculation(drafter=PromptLookup())))

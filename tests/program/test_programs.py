"""How many programs there are, and when they are compiled."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kvrt import CacheConfig, ContextShift, Runtime, Sampling
from kvrt.errors import BadConfig
from kvrt.program.batch import buckets
from kvrt.runtime.generate import After, GenerationSpec
from tests.toys import ToyLm

ALONE = True  # see conftest.py: what is counted was compiled here
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def compilations(caplog):
    """Messages of everything that JAX compiles while the test runs, eager operations included."""
    with jax.log_compiles():
        yield lambda: [r.message for r in caplog.records if r.message.startswith("Compiling")]


def kinds(runtime, kind):
    return [key for key in runtime.programs.compiled() if key[0] == kind]


@pytest.mark.parametrize("mode", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_one_decode_program_from_the_first_cell_to_the_last(mode, compilations):
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=90, block_size=8, rope=mode))
    runtime.append([1])
    tokens = runtime.generate()
    for _ in range(3):
        next(tokens)
    n = len(compilations())
    assert n > 0
    for _ in range(87):
        next(tokens)
    assert runtime.n_free == 0
    assert len(compilations()) == n
    assert len(kinds(runtime, "decode_steps")) == 1


@pytest.mark.slow
def test_one_forward_program_for_each_bucket():
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=512, block_size=16, n_ubatch=32))
    assert buckets(32) == (1, 8, 32)
    runtime.prepare(40)
    assert len(kinds(runtime, "forward")) == 2
    for n in (1, 2, 7, 8, 9, 31, 32, 33, 40, 63, 64):
        runtime.append([1] * n)
    assert len(kinds(runtime, "forward")) == 3
    n_compiles = runtime.programs.n_compiles
    for n in (5, 17, 50):
        runtime.append([1] * n)
    assert runtime.stats().n_compiles == runtime.programs.n_compiles == n_compiles


@pytest.mark.slow
def test_nothing_compiles_after_the_first_context_shift(compilations):
    config = CacheConfig(n_ctx=32, block_size=8)
    runtime = Runtime(ToyLm(n_layers=1), config, policy=ContextShift(n_keep=3))
    runtime.append(PROMPT)
    tokens = runtime.generate(stride=4)
    while runtime.stats().n_shift < 1:
        next(tokens)
    before = len(compilations()), runtime.stats().n_compiles
    for _ in range(80):
        next(tokens)
    assert runtime.stats().n_shift >= 5
    assert (len(compilations()), runtime.stats().n_compiles) == before


@pytest.mark.slow
def test_what_is_ahead_is_compiled_before_it_is_wanted():
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=64, block_size=16, n_ubatch=32))
    request = GenerationSpec(
        n_predict=5, seq_id=0, sampling=Sampling(), stop_ids=(3,), recent=(), n_best=2, stride=1
    )
    said = []
    runtime.prepare(40, request, progress=lambda *n: said.append(n))
    # What a test before this one has compiled may come from a disk.
    assert [x[:2] for x in said] == [(i, 4) for i in range(4)]
    # The decode step is still on its way, and counted.
    assert sorted(key[0] for key in runtime.programs.compiled()) == [
        "forward",
        "forward",
        "sampled_once",
    ]
    before = runtime.programs.compiled()
    runtime.programs.wait(lambda *n: said.append(n))
    assert [x[:2] for x in said[4:]] == [(3, 4), (4, 4)] and not runtime.programs.n_pending
    runtime.append([1] * 40)
    list(runtime.generate(5, stop_ids=(3,), n_best=2))
    after = runtime.programs.compiled()
    assert {key for key in after if key not in before} == set(kinds(runtime, "decode_steps"))
    assert len(kinds(runtime, "decode_steps")) == 1 and runtime.stats().n_compiles == 4
    assert runtime.stats().n_from_disk == 0


@pytest.mark.parametrize(
    ("n_predict", "after", "expected"),
    [
        (0, None, []),
        (1, None, ["sampled_once"]),
        (2, None, ["decode_steps", "sampled_once"]),
        (1, After(token=1, n_sampled=1), ["decode_steps"]),
        (None, None, ["decode_steps", "sampled_once"]),
    ],
)
def test_only_what_will_run_is_compiled_ahead(monkeypatch, n_predict, after, expected):
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=64, block_size=16, n_ubatch=32))
    found = []
    monkeypatch.setattr(
        runtime.programs,
        "compile_all",
        lambda now, later, _: (now(found.append), later(found.append)),
    )
    request = GenerationSpec(
        n_predict=n_predict,
        seq_id=0,
        sampling=Sampling(),
        stop_ids=(),
        recent=(),
        n_best=0,
        stride=1,
        after=after,
    )
    runtime.prepare(0, request)
    assert sorted(wanted.key[0] for wanted in found) == expected


@pytest.fixture
def disk(tmp_path):
    """A folder where JAX keeps compiled programs."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path / "xla"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_another_n_ctx_of_one_step_takes_its_programs_from_the_disk(disk):
    """1,530 and 1,501 cells are 96 and 94 blocks of 16: 96 in both arrays."""
    found = []
    for n_ctx in (1530, 1501, 1600):
        runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=n_ctx, block_size=16, n_ubatch=8))
        runtime.append([1, 2, 3])
        list(runtime.generate(3))
        stats = runtime.stats()
        assert stats.n_compiles == 3 and stats.n_ctx == n_ctx
        found.append(stats.n_from_disk)
    # To draw takes no cache: the first has compiled it for all.
    assert found == [0, 2, 0]


def test_a_second_runtime_of_the_kind_compiles_nothing(compilations):
    """Other weights, checkpoints and thresholds of defrag change no program; other sizes do."""
    config = CacheConfig(n_ctx=48, block_size=8, n_ubatch=8)
    first = Runtime(ToyLm(n_layers=1), config)
    logits = first.append(PROMPT)
    first.seq_add(0, 4, 8, 2)
    first.flush()
    n = len(compilations())
    assert first.programs.n_shared == 0 and n > 0
    same = CacheConfig(n_ctx=48, block_size=8, n_ubatch=8, n_checkpoints=2, defrag_threshold=0.5)
    for seed, at in ((0, config), (1, same)):
        runtime = Runtime(ToyLm(n_layers=1, seed=seed), at)
        found = runtime.append(PROMPT)
        runtime.seq_add(0, 4, 8, 2)
        runtime.flush()
        assert (found == logits).all() == (seed == 0)
        assert runtime.programs.n_shared == runtime.programs.n_compiles == 2
    assert [x for x in compilations()[n:] if "forward" in x or "shift" in x] == []
    other = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=64, block_size=8, n_ubatch=8))
    other.append(PROMPT)
    assert other.programs.n_shared == 0


def test_a_program_that_could_not_be_compiled_is_tried_again(monkeypatch):
    compile_once = jax.stages.Lowered.compile

    def fails(*_, **__):
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_once)
        raise MemoryError("no room to compile")

    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=40, block_size=8, n_ubatch=8))
    monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
    with pytest.raises(MemoryError, match="no room to compile"):
        runtime.append(PROMPT)
    assert np.isfinite(runtime.append(PROMPT)).all()


@pytest.mark.slow
def test_another_models_weights_are_refused():
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=16, block_size=8))
    before = runtime.append(PROMPT)
    with pytest.raises(BadConfig, match="has other parameters; make a new Runtime for it"):
        runtime.bind(ToyLm(n_layers=2))
    n = runtime.programs.n_compiles
    runtime.bind(ToyLm(n_layers=1, seed=1))
    runtime.clear()
    assert (runtime.append(PROMPT) != before).any()
    assert runtime.programs.n_compiles == n

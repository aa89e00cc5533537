"""Logits with NaN, +inf or no finite value: they end a sequence with an error, and no other one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, Runtime, Sampling
from kvrt.errors import BadLogits
from kvrt.options.engine import EngineConfig
from kvrt.program import sample
from kvrt.serving import prometheus
from kvrt.serving.engine import Engine
from tests.interpreted import GPU, TPU
from tests.marks import full, slow
from tests.numpy_device.device import compiled
from tests.serving.engines import ask
from tests.toys import HybridLm, RowModel, ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

PROMPT, POISON = [3, 1, 4, 1, 5], 60
DRAWS = [Sampling(), Sampling(temp=1.0, top_k=3, top_p=0.9, seed=2)]


def poisoned(model, token=POISON):
    """A model that cannot read a token: what is computed of it is NaN."""
    model.embedding[...] = model.embedding[...].at[token].set(jnp.nan)
    return model


@functools.cache
def sound() -> Runtime:
    return Runtime(ToyLm(), CacheConfig(n_ctx=64, n_seq_max=2, block_size=16, n_ubatch=16))


def generated(n, prompt=PROMPT, **options):
    sound().clear()
    sound().append(prompt)
    return [t.id for t in sound().generate(n, **options)]


@pytest.mark.parametrize("sampling", DRAWS)
def test_a_row_without_a_token_is_marked_and_the_others_are_as_they_were(sampling):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 20)).astype(np.float32)
    rows[3, 4:] = -np.inf  # some tokens are ruled out, which is sound
    bad = rows.copy()
    bad[0, 7], bad[2, 3], bad[4] = np.nan, np.inf, -np.inf
    sampler = sample.create(sampling, [[1, 2]] * 6)
    good, _ = (np.asarray(x) for x in _drawn(rows, sampler))
    found, last = (np.asarray(x) for x in _drawn(bad, sampler))
    marked = [0, 2, 4]
    assert found[marked].tolist() == [sample.NO_TOKEN] * 3 == last[marked].tolist()
    others = [1, 3, 5]
    assert found[others].tolist() == good[others].tolist() and (good >= 0).all()
    assert [sample.can_sample(x) for x in bad] == [i in others for i in range(6)]


@jax.jit
def _drawn(logits, sampler):
    tokens, after = sample.sample_tokens(jnp.asarray(logits), sampler)
    return tokens, after.recent[:, -1]


@compiled()
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("sampling", DRAWS)
def test_a_generation_ends_where_its_logits_do(stride, sampling):
    wanted = generated(10, sampling=sampling)
    # The first token that was not there before, so that nothing else is changed by it.
    at = next(i for i, t in enumerate(wanted) if i >= 2 and t not in [*PROMPT, *wanted[:i]])
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=16, n_ubatch=16)
    runtime = Runtime(poisoned(ToyLm(), wanted[at]), config)
    runtime.append(PROMPT)
    found = []
    position = f"sequence 0: the logits of its token at position {len(PROMPT) + at} have NaN"
    with pytest.raises(BadLogits, match=position) as caught:
        for token in runtime.generate(10, sampling=sampling, stride=stride, n_best=2):
            found.append(token.id)
            assert np.isfinite([x for _, x in token.best]).all()
    assert found == wanted[: at + 1]
    assert "\n" not in str(caught.value) and runtime.stats().n_bad_logits == 1
    # All that was yielded is held; without it the cells serve others as if it had never been.
    assert runtime.token_history()[1].tolist() == [*PROMPT, *found]
    runtime.seq_rm(0)
    runtime.append(PROMPT[:3], 1)
    assert [t.id for t in runtime.generate(2, 1)] == generated(2, PROMPT[:3])


@pytest.mark.slow
def test_the_first_token_needs_logits_too():
    runtime = Runtime(poisoned(ToyLm()), CacheConfig(n_ctx=32, block_size=16, n_ubatch=16))
    runtime.append([*PROMPT, POISON])
    with pytest.raises(BadLogits, match="position 5"):
        next(runtime.generate(3))


@pytest.mark.parametrize("mode", ["paged", pytest.param("cell", marks=pytest.mark.slow)])
def test_a_request_without_logits_fails_alone(mode):
    wanted = generated(6)
    config = CacheConfig(n_ctx=256, n_seq_max=4, block_size=4, n_ubatch=16)
    engine = Engine(poisoned(ToyLm()), config, EngineConfig(mode=mode))
    long = [7, 8, 9, POISON, 1, 2, 3, 4, 5, 6]
    assert POISON not in wanted
    for round_ in range(2):
        engine.add_request(ask("good", PROMPT))
        engine.add_request(ask("bad", long, n=2))
        engine.add_request(ask("fine", PROMPT, sampling=DRAWS[1]))
        found = {}
        while engine.has_work:
            for out in engine.step():
                found.setdefault((out.id, out.sample), []).append(out)
        assert [t for out in found["good", 0] for t in out.tokens] == wanted
        for sample_ in (0, 1):
            (out,) = found["bad", sample_]
            assert (out.finish_reason, out.tokens) == ("error", ())
            assert out.error.startswith("request 'bad': the logits of its token at position 9 have")
            # Nobody finds what was computed of it.
            assert out.n_cached in (0, len(long))  # of a sample that parted from the first: all
        assert found["bad", 0][0].n_cached == 0
        assert found["fine", 0][-1].finish_reason == "length"
        report = engine.stats()
        assert report.n_bad_logits == report.finished["error"] == 2 * (round_ + 1)
    assert "kvrt_bad_logits_total 4.0\n" in prometheus.exposition(report)
    assert len(engine.space._free) == 4


@pytest.mark.slow
def test_a_state_without_numbers_ends_its_sequence_and_no_other():
    model = poisoned(HybridLm(), 30)
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=16, n_ubatch=16)
    good = Runtime(HybridLm(), config)
    good.append([5, 6])
    wanted = [t.id for t in good.generate(4)]
    runtime = Runtime(model, config)
    runtime.append([1, 30, 2])
    with pytest.raises(BadLogits, match="position 2"):
        next(runtime.generate(3))
    runtime.seq_rm(0)
    for seq in (0, 1):
        runtime.append([5, 6], seq)
        assert [t.id for t in runtime.generate(4, seq)] == wanted


DAMAGE = [
    *(("chunked", "k", np.nan), full("chunked", "v", np.nan), ("chunked", "v", np.inf)),
    *(
        full("reference", "k", np.nan),
        slow("reference", "v", np.nan),
        full("reference", "v", np.inf),
    ),
    *(slow(GPU, "k", np.nan), full(GPU, "v", np.nan), slow(GPU, "v", np.inf)),
    *(slow(TPU, "k", np.nan), full(TPU, "v", np.nan), slow(TPU, "v", np.inf)),
]


@compiled()
@pytest.mark.parametrize(("attention", "side", "bad"), DAMAGE)
def test_damage_reaches_those_who_see_it_and_nobody_else(attention, side, bad):
    logits = []
    for value in (0.5, bad):
        model = RowModel()
        table = getattr(model, side)
        table[...] = table[...].at[9, 1, 2].set(value)  # one channel of one head
        config = CacheConfig(n_ctx=32, n_seq_max=2, block_size=16, n_ubatch=8, attention=attention)
        runtime = Runtime(model, config)
        runtime.append([1, 2, 3], 0)
        runtime.append([4, 9, 5], 1)
        # Both in one step and in one block, beside the cached cell and as tokens of the step.
        both = runtime.decode({0: 6, 1: 7})
        late = runtime.decode({0: 8, 1: 9})
        logits.append([np.asarray(x) for x in (both[0], late[0], both[1], late[1])])
    for found, wanted in zip(logits[1][:2], logits[0][:2], strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert all(np.isnan(x).any() for x in logits[1][2:])

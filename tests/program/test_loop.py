"""Many steps in one program draw what single steps draw; a whole loop, shifts included, in jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from kvrt import CacheConfig, ContextShift, Runtime, Sampling
from kvrt import cells as kc
from kvrt.cells.slots import Places
from kvrt.program import decode_loop, sample
from kvrt.program.batch import Batch
from kvrt.program.layout import cell_layout
from kvrt.program.step import Cache, StepSpec, create, forward
from kvrt.sizes import extent
from kvrt.store import kv as kv_store
from kvrt.upkeep import shift
from tests.toys import ToyLm, allclose

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
N_CTX, N_KEEP = 20, 2
SEEDED = Sampling(temp=0.9, top_k=30, top_p=0.95, min_p=0.01, repeat_penalty=1.2, seed=7)


@pytest.fixture(scope="module")
def model():
    return ToyLm(n_layers=1)


@pytest.fixture(scope="module")
def runtime(model):
    return Runtime(model, CacheConfig(n_ctx=48, n_seq_max=3, block_size=8, n_ubatch=8))


@pytest.fixture
def fresh(runtime):
    runtime.clear()
    runtime.append(PROMPT)
    return runtime


def ids(tokens):
    return [token.id for token in tokens]


def text(runtime, n, **how):
    """Ids of n tokens; always with two log-probabilities, so that few programs do."""
    return ids(runtime.generate(n, n_best=2, **how))


def by_decode(runtime, n, sampling, recent=()):
    """Draws n tokens with one call of `decode` for each."""
    sampler = sample.create(sampling, [list(recent)])
    logits, out = runtime.last_logits(0), []
    for i in range(n):
        sampled, sampler = runtime._cache.device.sample(logits, sampler, 2)
        drawn = sampled.tokens[0]
        out.append(int(drawn[0]))
        if i < n - 1:
            logits = runtime.decode({0: out[-1]})[0][None]
    return out


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
def test_every_stride_draws_the_same_tokens(fresh, sampling):
    def run(stride):
        fresh.clear()
        fresh.append(PROMPT)
        tokens = list(fresh.generate(21, sampling=sampling, recent=PROMPT, stride=stride, n_best=2))
        return tokens, fresh.cells, [np.asarray(x) for x in jax.tree.leaves(fresh.cache)]

    one, eight = run(1), run(8)
    assert ids(one[0]) == ids(eight[0])
    assert len(set(ids(one[0]))) > 3
    for a, b in zip(one[0], eight[0], strict=True):
        assert [i for i, _ in a.best] == [i for i, _ in b.best]
        allclose([x for _, x in a.best], [x for _, x in b.best])
    for a, b in zip(one[2], eight[2], strict=True):
        allclose(a, b)
    fresh.clear()
    fresh.append(PROMPT)
    assert by_decode(fresh, 21, sampling, PROMPT) == ids(one[0])
    assert fresh.cells.pos.tolist() == one[1].pos.tolist() == eight[1].pos.tolist()


def test_another_seed_draws_other_tokens(fresh):
    first = text(fresh, 12, sampling=SEEDED)
    fresh.clear()
    fresh.append(PROMPT)
    assert text(fresh, 12, sampling=dataclasses.replace(SEEDED, seed=8)) != first


@pytest.mark.parametrize("stride", [1, 8])
def test_a_stop_token_ends_the_run_within_a_stride(fresh, stride):
    whole = text(fresh, 16, sampling=SEEDED)
    stop = next(t for i, t in enumerate(whole) if i >= 4 and t not in whole[:i])
    n = whole.index(stop) + 1
    # Not the last step of a run of 8 after the first draw.
    assert 1 < n < 16 and n % 8 != 1
    fresh.clear()
    fresh.append(PROMPT)
    found = text(fresh, 16, sampling=SEEDED, stop_ids=[stop], stride=stride)
    assert found == whole[:n]
    # All but the stop token itself are in the cache, on both sides, and nothing beyond.
    assert fresh.seq_pos_max() == len(PROMPT) + n - 2
    host = fresh.cells
    for a, b in zip(jax.tree.leaves(fresh.cache.cells), jax.tree.leaves(host), strict=True):
        np.testing.assert_array_equal(a, b)


def test_several_sequences_in_one_step_equal_separate_runs(runtime):
    prompts = {0: PROMPT, 1: PROMPT[:3], 2: [7, 7]}

    def alone(seq):
        runtime.clear()
        runtime.append(prompts[seq], seq)
        return [runtime.decode({seq: t})[seq] for t in (11, 12, 13)]

    separate = {seq: alone(seq) for seq in prompts}
    runtime.clear()
    for seq, prompt in prompts.items():
        runtime.append(prompt, seq)
    for i, t in enumerate((11, 12, 13)):
        together = runtime.decode(dict.fromkeys((2, 0, 1), t))
        assert list(together) == [2, 0, 1]
        for seq, logits in together.items():
            allclose(logits, separate[seq][i])


def test_a_run_of_two_sequences_equals_separate_runs(model, runtime):
    prompts = {0: PROMPT, 2: PROMPT[:3]}

    def alone(seq):
        runtime.clear()
        runtime.append(prompts[seq], seq)
        return text(runtime, 6, seq_id=seq)

    separate = [alone(seq) for seq in prompts]
    runtime.clear()
    for seq, prompt in prompts.items():
        runtime.append(prompt, seq)
    slots = np.arange(11, 21, dtype=np.int32).reshape(5, 2)
    plan = decode_loop.LoopPlan(
        tokens=np.array([s[0] for s in separate], np.int32),
        pos=np.array([8, 3], np.int32),
        seq_ids=np.array([0, 2], np.int32),
        places=(
            Places(
                slots=slots,
                blocks=np.arange(6, dtype=np.int32),
                n_blocks=np.asarray(6, np.int32),
            ),
        ),
        n_steps=np.asarray(5, np.int32),
        stop_ids=np.zeros(0, np.int32),
    )
    sampler, config = sample.create(Sampling(), [[], []]), runtime.config
    spec = StepSpec(config, cell_layout(model.groups, None, config))

    def step(cache, batch):
        return forward(model, cache, batch, spec)

    run = jax.jit(lambda cache: decode_loop.decode_many(step, cache, plan, sampler, 0))
    drawn, cache, _ = run(runtime.cache)
    assert int(drawn.n_steps) == 5
    assert np.asarray(drawn.tokens).T.tolist() == [s[1:] for s in separate]
    np.testing.assert_array_equal(cache.cells[0].pos[slots[:, 0]], np.arange(8, 13))


# --- the whole loop in one program -------------------------------------------------------------


def context_shift(cache, n_past, config, group):
    """Drops half of what is not kept, moves the rest down and turns stored keys, all traced."""
    n = (n_past - N_KEEP) // 2
    cells = kc.seq_rm(cache.cells[0], 0, N_KEEP, N_KEEP + n)
    cells = kc.seq_add(cells, 0, N_KEEP + n, None, -n)
    store = cache.stores[0]
    if config.rope == "write":
        plan = shift.plan_shift(cells, extent(group, config).n_blocks, config.block_size)
        store = shift.apply_shift(store, plan, group, config.n_ctx)
    return Cache(stores=(store,), cells=(shift.settle(cells),))


def step(model, cache, head, tokens, config):
    """Evaluates tokens at the end of sequence 0, in cells that are found here and now."""
    n = tokens.shape[0]
    (cells,) = cache.cells
    slots, _ = kc.find_slots(cells, head, n)
    first = kc.seq_pos_max(cells, 0) + 1
    n_blocks = extent(model.groups[0], config).n_blocks
    places = Places(
        slots=slots, blocks=jnp.arange(n_blocks, dtype=jnp.int32), n_blocks=jnp.int32(n_blocks)
    )
    batch = Batch(
        tokens=tokens,
        pos=first + jnp.arange(n, dtype=jnp.int32),
        seq_ids=jnp.zeros(n, jnp.int32),
        places=(places,),
        out_ids=jnp.array([n - 1], jnp.int32),
    )
    spec = StepSpec(config, cell_layout(model.groups, None, config))
    logits, cache = forward(model, cache, batch, spec)
    return jnp.argmax(logits[0]).astype(jnp.int32), cache, kc.next_head(slots)


def whole_loop(model, prompt, n, config):
    """Prefill, n greedy tokens and the context shifts between them, as one traced function."""
    cache = create(StepSpec(config, cell_layout(model.groups, None, config)))
    token, cache, head = step(model, cache, jnp.int32(0), prompt, config)

    def body(i, carry):
        cache, head, token, out, n_shift = carry
        full = kc.n_free(cache.cells[0]) <= 1
        n_past = kc.seq_pos_max(cache.cells[0], 0) + 1
        cache = lax.cond(
            full, lambda c: context_shift(c, n_past, config, model.groups[0]), lambda c: c, cache
        )
        head = jnp.where(full, 0, head)  # as the runtime starts its next search
        token, cache, head = step(model, cache, head, token[None], config)
        return cache, head, token, out.at[i].set(token), n_shift + full.astype(jnp.int32)

    out = jnp.zeros(n, jnp.int32).at[0].set(token)
    first = cache, head, token, out, jnp.int32(0)
    cache, _, _, out, n_shift = lax.fori_loop(1, n, body, first)
    return out, n_shift, cache


@pytest.mark.parametrize("mode", ["write", "read"])
def test_two_context_shifts_inside_one_jit(mode):
    model = ToyLm()
    config = CacheConfig(n_ctx=N_CTX, block_size=8, n_ubatch=8, rope=mode, attention="chunked")
    runtime = Runtime(model, config, policy=ContextShift(n_keep=N_KEEP))
    runtime.append(PROMPT)
    expected = ids(runtime.generate(24))
    assert runtime.stats().n_shift == 2

    graph, params = nnx.split(model)
    program = jax.jit(lambda params, p: whole_loop(nnx.merge(graph, params), p, 24, config))
    out, n_shift, cache = program(params, jnp.array(PROMPT, jnp.int32))
    assert int(n_shift) == 2
    assert out.tolist() == expected
    host = runtime.group_cells
    for a, b in zip(jax.tree.leaves(cache.cells), jax.tree.leaves(host), strict=True):
        np.testing.assert_array_equal(a, b)
    used = np.flatnonzero(runtime.cells.pos >= 0).astype(np.int32)
    for layer in range(2):
        mine = kv_store.read_kv(cache.stores[0], layer, used)
        theirs = kv_store.read_kv(runtime.cache.stores[0], layer, used)
        for a, b in zip(mine, theirs, strict=True):
            allclose(a, b, 1e-4)

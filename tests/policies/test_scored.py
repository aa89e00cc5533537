"""Layers that keep tokens by score, beside the plain ones; and what a runtime makes of them."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import (
    CacheConfig,
    GroupSpec,
    MaskSpec,
    Quest,
    RopeSpec,
    Runtime,
    SelfExtend,
)
from kvrt.attention.scored import attend, evict
from kvrt.attention.scored.attend import recurrence
from kvrt.attention.scored.spec import SlotSpec, empty_slots, slots_of, tables_of
from kvrt.errors import BadConfig
from kvrt.policies.scored import H2O, SCORED, TOVA, ScoredPolicy, SnapKV, SparseWindow
from tests.marks import first_fast, slow
from tests.policies.plainscored import PlainLayer, rotation
from tests.sharedlm import CLA2, SharedLm
from tests.toys import ToyLm

N_KV, D, N_TOKENS = 2, 8, 100
GROUP = GroupSpec(layers=(0,), n_kv_heads=N_KV, head_dim=D, rope=RopeSpec(n_rot=D, base=100.0))
SIZES = {"budget": 20, "interval": 8, "n_sink": 2, "n_recent": 5}
SETTINGS = {
    "snapkv": {"window": 5, "kernel": 3},
    "keyformer": {"tau": 1.0, "tau_end": 2.0, "n_anneal": 60},
    "expected_attention": {"n_future": 16},
    "sparse_window": {"score_horizon": 6},
}
REFRESH = {"score_horizon": 6, "n_read": 16, "refresh_every": 4}
CLOSED = [(name, SETTINGS.get(name, {}) | {"close_up": True}) for name in SCORED]
SHARED = {name: SETTINGS.get(name, {}) | {"head_share": 0.3} for name in SCORED if name != "tova"}
CASES = [
    # An interval that is no multiple of refresh_every: chosen slots are read after an eviction.
    ("sparse_window", REFRESH | {"interval": 6}),
    ("sparse_window", REFRESH),
    *((name, SETTINGS.get(name, {})) for name in SCORED),
    ("h2o", {"normalised": True}),
    ("sparse_window", REFRESH | {"n_recent": 3}),
    *SHARED.items(),
    ("h2o", {"head_share": 0.3, "interval": 1}),
    ("sparse_window", REFRESH | {"head_share": 0.5}),
    *CLOSED,
    ("h2o", {"close_up": True, "head_share": 0.3}),
    ("expected_attention", SHARED["expected_attention"] | {"close_up": True}),
]


def tokens(seed):
    """Queries with and without RoPE, keys and values; sharp, so that wrong masks show."""
    rng = np.random.default_rng(seed)
    q, k = (3 * rng.standard_normal((N_TOKENS, n, D)) for n in (2 * N_KV, N_KV))
    v = rng.standard_normal((N_TOKENS, N_KV, D))
    at = np.array([rotation(p, D) for p in range(N_TOKENS)])
    return np.einsum("tde,the->thd", at, q), np.einsum("tde,the->thd", at, k), v, q


def plain_keys(k):
    """Keys of `tokens` without RoPE."""
    at = np.array([rotation(-p, D) for p in range(N_TOKENS)])
    return np.einsum("tde,the->thd", at, k)


def spec_of(policy, **changed):
    n_q = 2 * N_KV if policy.observed_by.queries else 0
    fields = {"group": GROUP, "budget": policy.budget, "type_k": "f32", "type_v": "f32"}
    return SlotSpec(policy=policy, n_ctx=N_TOKENS, n_q_heads=n_q, **fields | changed)


def padded_part(start, n, size):
    """Indices of n tokens, and as padding of the text's last one."""
    return np.minimum(np.arange(start, start + (1 if n == 1 else size)), N_TOKENS - 1)


@functools.cache
def program(spec):
    return jax.jit(recurrence(spec, None)[1])


@jax.jit
def taken_of(marks):
    return marks.pos, marks.taken


def run(spec, rows, parts, first=0):
    """Outputs of all tokens and the slots behind each part, in parts of so many tokens."""
    q, k, v, raw = (x.astype(np.float32) for x in rows)
    state, outs, held, start = tables_of(empty_slots(spec)), [], [], 0
    many = program(spec)
    for n in parts:
        # Padded, as the tokens of a step are: one program for parts of any length but 1.
        at = padded_part(start, n, max(parts))
        pos = (first + at).astype(np.int32)
        mine = q[at], k[at], v[at], pos, *([raw[at]] if spec.n_q_heads else [])
        state, (out, _) = many(state, np.int32(0), mine, np.int32(n))
        outs.append(np.asarray(out)[:n])
        pos, taken = map(np.asarray, taken_of(slots_of(spec, state).marks))
        held.append([x[at] for x, at in zip(pos, taken, strict=True)])
        start += n
    return np.concatenate(outs), held


@pytest.mark.parametrize(("name", "settings"), first_fast(CASES, 7), ids=lambda x: str(x))
def test_tokens_kept_and_outputs_are_those_of_the_lists(name, settings):
    rows, settings = tokens(1), SIZES | settings
    if settings.get("close_up"):
        rows = (rows[3], plain_keys(rows[1]), *rows[2:])
    spec = spec_of(SCORED[name](**settings))
    out, held = run(spec, rows, [1] * N_TOKENS)
    plain = PlainLayer(name, n_kv=N_KV, **settings)
    for i in range(N_TOKENS):
        wanted = plain.step(*(x[i] for x in rows[:3]), i, rows[3][i])
        assert [list(x) for x in held[i]] == [[t.pos for t in x] for x in plain.heads], i
        np.testing.assert_allclose(out[i], wanted, atol=2e-5)
    every = settings["interval"]
    assert sum(map(len, plain.heads)) == N_KV * (20 + (N_TOKENS - 20) % every)
    # Scores of these are the same for all heads.
    apart = "head_share" in settings and name not in ("recent_only", "random_tokens")
    assert any(len({len(x) for x in heads}) > 1 for heads in held) == apart


DIVIDED = [
    ("h2o", {}),
    ("sparse_window", REFRESH),
    ("snapkv", SHARED["snapkv"]),
    *(slow(name, SETTINGS.get(name, {})) for name in SCORED if name != "h2o"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), DIVIDED, ids=str)
def test_how_steps_divide_the_tokens_changes_nothing(name, settings):
    parts = [33, 1, 40, 26]
    rows, spec = tokens(2), spec_of(SCORED[name](**SIZES, **settings))
    out, held = run(spec, rows, parts)
    wanted, by_one = run(spec, rows, [1] * N_TOKENS)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    ends = np.cumsum(parts) - 1
    for mine, end in zip(held, ends, strict=True):
        assert list(map(list, mine)) == list(map(list, by_one[end]))


@pytest.mark.parametrize("close_up", [slow(False), True])
def test_slots_are_read_and_moved_in_tiles(close_up, monkeypatch):
    """The last of four begins within the third."""
    rows, parts = tokens(2), [33, 1, 40, 26]
    spec = spec_of(H2O(**SIZES, close_up=close_up))
    wanted, kept = run(spec, rows, parts)
    monkeypatch.setattr(attend, "TILE", 9)
    monkeypatch.setattr(evict, "TILE", 9)
    monkeypatch.setattr(sys.modules[__name__], "program", program.__wrapped__)
    out, held = run(spec, rows, parts)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    assert [list(map(list, x)) for x in held] == [list(map(list, x)) for x in kept]


def test_padding_beside_slots_that_are_almost_full_writes_nothing():
    """Its index is that behind the last state, where an eviction would be clamped to that one."""
    rows, spec = tokens(1), spec_of(H2O(**SIZES))
    q, k, v, _ = (x[:28].astype(np.float32) for x in rows)
    pos, index = np.arange(28, dtype=np.int32), np.int32(0)
    parts = (q, k, v, pos)
    full, _ = program(spec)(tables_of(empty_slots(spec)), index, parts, np.int32(27))
    one = jax.jit(recurrence(spec, None)[0])
    after, (out, _) = one(full, index + 1, tuple(x[27] for x in parts))
    for x, y in zip(full, after, strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isfinite(out).all()
    after, _ = one(full, index, tuple(x[27] for x in parts))
    assert not np.array_equal(full[0], after[0])


def test_keys_by_place_know_nothing_of_positions():
    """A text of any length is read within the places of its slots."""
    settings = SIZES | {"n_sink": 0, "close_up": True}
    rows, spec = (tokens(1)[3], *tokens(1)[1:]), spec_of(H2O(**settings))
    near, held = run(spec, rows, [60, 40])
    far, later = run(spec, rows, [60, 40], first=10**7)
    np.testing.assert_array_equal(near, far)
    assert [list(x) for x in held[-1]] == [list(x - 10**7) for x in later[-1]]
    assert not (run(spec_of(H2O(**SIZES)), rows, [60, 40])[0] == near).all()


def test_one_token_for_each_that_comes():
    rows, sizes = tokens(3), SIZES | {"interval": 1}
    _, held = run(spec_of(H2O(**sizes)), rows, [60, 40])
    plain = PlainLayer("h2o", n_kv=N_KV, **sizes)
    for i in range(N_TOKENS):
        plain.step(*(x[i] for x in rows[:3]), i)
    assert [list(x) for x in held[-1]] == [[t.pos for t in x] for x in plain.heads]


def test_heads_keep_tokens_of_their_own():
    """The control: one set for all heads would pass where heads agree."""
    _, held = run(spec_of(H2O(**SIZES)), tokens(1), [60, 40])
    assert set(held[-1][0]) != set(held[-1][1])


def test_a_query_never_scores_what_comes_after_it():
    """A prefix keeps what it keeps, whatever follows it."""
    rows, other = tokens(4), tokens(5)
    mixed = tuple(np.concatenate([a[:60], b[60:]]) for a, b in zip(rows, other, strict=True))
    spec = spec_of(H2O(**SIZES))
    _, one = run(spec, rows, [60, 40])
    _, two = run(spec, mixed, [60, 40])
    assert list(map(list, one[0])) == list(map(list, two[0]))
    assert list(map(list, one[1])) != list(map(list, two[1]))


def test_some_are_read_and_the_others_stay():
    """Dense queries alone would give the same sets: what is read is counted."""
    rows, settings = tokens(1), SIZES | {"budget": 99} | REFRESH
    plain = PlainLayer("sparse_window", n_kv=N_KV, **settings)
    out, held = run(spec_of(SCORED["sparse_window"](**settings)), rows, [1] * N_TOKENS)
    wanted = [plain.step(*(x[i] for x in rows[:3]), i) for i in range(N_TOKENS)]
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    assert [list(x) for x in held[-1]] == [list(range(N_TOKENS))] * N_KV
    dense = PlainLayer("h2o", n_kv=N_KV, **SIZES | {"budget": 99})
    every = [dense.step(*(x[i] for x in rows[:3]), i) for i in range(N_TOKENS)]
    np.testing.assert_allclose(wanted[:16], every[:16], atol=1e-12)
    assert np.abs(np.array(wanted[16:]) - every[16:]).max() > 0.1
    # 25 queries read all, 75 at most 16.
    assert plain.n_products <= 4 * (sum(range(1, 101, 4)) + 75 * 16) < dense.n_products / 2


@pytest.mark.parametrize("end", [slow(64), 65, slow(67)])
def test_no_slot_is_read_that_is_not_chosen(end):
    """Keys of other slots may be no number, and nobody sees it."""
    rows, settings = tokens(1), SIZES | {"budget": 99} | REFRESH
    spec = spec_of(SCORED["sparse_window"](**settings))
    q, k, v, _ = (x.astype(np.float32) for x in rows)
    one, many = recurrence(spec, None)
    one, many, index = jax.jit(one), jax.jit(many), np.int32(0)
    state = tables_of(empty_slots(spec))
    pos = np.arange(N_TOKENS, dtype=np.int32)
    state, _ = many(state, index, (q[:end], k[:end], v[:end], pos[:end]), np.int32(end))
    slots = slots_of(spec, state)
    read = np.zeros((N_KV, spec.n_slots), bool)
    read[:, end - 8 + 1 : end] = True
    for h, at in enumerate(np.asarray(slots.marks.chosen)):
        read[h, at[at > 0] - 1] = True
    assert 12 <= read.sum(1).min() <= read.sum(1).max() <= 15
    hurt = dataclasses.replace(
        slots,
        k=np.where(read[:, None], slots.k, np.float32(np.nan)),
        v=np.where(read[:, :, None], slots.v, np.float32(np.nan)),
    )
    token = q[end], k[end], v[end], pos[end]
    outs = [one(tables_of(x), index, token)[1][0] for x in (slots, hurt)]
    assert np.isnan(outs[1]).any() == (end % 4 == 0)
    if end % 4:
        np.testing.assert_array_equal(*outs)


# Steps of one and of eight tokens; longer ones are above.
CONFIG = CacheConfig(n_ctx=64, n_ubatch=8, n_seq_max=2)
TEXT = [int(x) for x in np.random.default_rng(7).integers(0, 64, 60)]


def logits(runtime, text, parts, seq_id=0):
    found, start = [], 0
    for n in parts:
        found.append(runtime.append(text[start : start + n], seq_id, out_ids=range(n)))
        start += n
    return np.concatenate(found)


@pytest.mark.slow
# The matrix has h2o, snapkv and sparse_window; these look at other things.
@pytest.mark.parametrize("name", ["tova", "expected_attention"])
def test_with_room_for_all_it_is_plain_attention(name):
    model = ToyLm(n_layers=1)
    policy = SCORED[name](budget=60, interval=8, n_sink=2, n_recent=8, **SETTINGS.get(name, {}))
    wanted = logits(Runtime(model, CONFIG), TEXT, [32, 28])
    for by in (policy, dataclasses.replace(policy, close_up=True)):
        found = logits(Runtime(model, CONFIG, policy=by), TEXT, [32, 28])
        np.testing.assert_allclose(found, wanted, atol=2e-4)


@pytest.mark.slow
def test_a_sequence_is_copied_and_ends_apart():
    model, policy = ToyLm(), H2O(budget=20, interval=8)
    runtime = Runtime(model, CONFIG, policy=policy)
    logits(runtime, TEXT, [30])
    runtime.seq_cp(0, 1)
    first, second = (logits(runtime, TEXT[30:] if s else TEXT[:30], [20], s) for s in (0, 1))
    for s, rest, found in ((0, TEXT[:20], first), (1, TEXT[30:50], second)):
        del s
        alone = Runtime(model, CONFIG, policy=policy)
        logits(alone, TEXT, [30])
        np.testing.assert_allclose(found, logits(alone, rest, [20]), atol=2e-4)


def test_bytes_are_those_of_the_budget():
    model, n_ctx = ToyLm(), 4096
    config = CacheConfig(n_ctx=n_ctx)
    found = Runtime(model, config, policy=H2O(budget=120, interval=8)).cache
    dense = Runtime(model, config).cache
    kept, whole = (
        sum(x.nbytes for x in jax.tree.leaves((c.stores, c.states))) for c in (found, dense)
    )
    # 128 slots of 4,096 cells, and a position and a sum beside 16 channels of keys and values.
    assert kept == whole * 128 / n_ctx * (1 + 2 / 32) + 2 * 4


@pytest.mark.slow
def test_kept_positions_by_layer_and_head():
    runtime = Runtime(ToyLm(), CONFIG, policy=H2O(budget=20, interval=8))
    assert runtime.kept_positions() == {}
    logits(runtime, TEXT, [50])
    kept = runtime.kept_positions()
    assert list(kept) == [0, 1] and all(len(x) == 2 for x in kept.values())
    # 20 after the evictions at 28, 36 and 44 tokens, and the 6 that came since then.
    assert {len(head) for layer in kept.values() for head in layer} == {26}
    assert all(set(range(34, 50)) <= set(head) for layer in kept.values() for head in layer)
    assert Runtime(ToyLm(), CONFIG).kept_positions() == {}


@pytest.mark.slow
def test_what_was_read_is_cut_back_to_a_kept_state():
    config = dataclasses.replace(CONFIG, n_rs_seq=4, n_checkpoints=4, checkpoint_interval=32)
    runtime = Runtime(ToyLm(), config, policy=H2O(budget=20, interval=8))
    wanted = logits(runtime, TEXT, [60])
    assert not runtime.can_remove(0, 10, 20)
    for first in (57, 40):
        runtime.seq_rm(0, first, None)
        np.testing.assert_allclose(
            logits(runtime, TEXT[first:], [60 - first]), wanted[first:], atol=2e-4
        )


@pytest.mark.slow
def test_generation_on_the_device_is_that_of_steps():
    model, policy = ToyLm(), SnapKV(budget=20, interval=8, window=5)
    runs = []
    for stride in (1, 8):
        runtime = Runtime(model, CONFIG, policy=policy)
        runtime.append(TEXT[:50])
        runs.append([t.id for t in runtime.generate(40, stride=stride)])
    assert runs[0] == runs[1]
    assert len(runs[0]) == 40


@pytest.mark.slow
def test_a_session_has_what_was_kept(tmp_path):
    from kvrt import session

    model, policy = ToyLm(), H2O(budget=20, interval=8)
    runtime = Runtime(model, CONFIG, policy=policy)
    logits(runtime, TEXT, [50])
    path = tmp_path / "kept.kv"
    session.save(path, runtime.snapshot())
    wanted = logits(runtime, TEXT[50:], [10])
    again = Runtime(model, CONFIG, policy=policy)
    again.restore(session.read(path))
    np.testing.assert_array_equal(logits(again, TEXT[50:], [10]), wanted)
    for other in (H2O(budget=24, interval=8), None):
        with pytest.raises(Exception, match="scored"):
            Runtime(model, CONFIG, policy=other).restore(session.read(path))


class Mine(ScoredPolicy):
    """A policy of one's own: even positions first."""

    def score(self, seen):
        return -(seen.pos % 2).astype(jnp.float32)


def test_a_policy_of_ones_own():
    _, held = run(spec_of(Mine(**SIZES)), tokens(1), [N_TOKENS])
    old = held[-1][0][:-10]
    assert set(old[2:] % 2) == {0}


BAD = [
    (lambda: H2O(budget=2, n_recent=2), "leaves none to choose; give"),
    (lambda: H2O(budget=40, n_sink=30, n_recent=10), "a budget of 40 tokens a head"),
    (lambda: H2O(budget=40, interval=0), "interval is 0"),
    (lambda: H2O(budget=40, pyramid=2.0), "pyramid is 2.0"),
    (lambda: SnapKV(budget=64, interval=16), "raise interval"),
    (lambda: SnapKV(budget=64, kernel=4), "kernel is 4"),
    (lambda: H2O(budget=40, head_share=0.0), "head_share is 0.0"),
    (lambda: TOVA(budget=40, head_share=0.5), "the same tokens in all heads"),
    (lambda: SparseWindow(budget=64, n_read=96), "a head keeps 64 tokens; read fewer"),
    (lambda: SparseWindow(budget=64, n_read=32), "raise n_read, or lower refresh_every"),
    (lambda: SparseWindow(budget=99, n_read=72, refresh_every=20), "a multiple of refresh_every"),
    (lambda: SparseWindow(budget=99, n_read=72, refresh_every=0), "refresh_every is 0"),
    (lambda: SparseWindow(budget=99, n_read=64, close_up=True), "leave one of the two out"),
]


REFUSED = [
    ({"rope": "read"}, ToyLm, "rope='read' is for keys whose positions move"),
    ({"type_k": "kivi4", "block_size": 32}, lambda: ToyLm(head_dim=32), "use int4 or int8"),
    ({"self_extend": SelfExtend(ga_n=2, ga_w=8)}, ToyLm, "use one of the two"),
    ({"select": Quest(n_cells=80)}, ToyLm, "sparse reads choose among all tokens"),
    ({}, lambda: ToyLm(masks=[MaskSpec(kind="window", size=8)] * 2), "this model has none"),
    ({}, lambda: SharedLm(CLA2), "by what that one alone attends to"),
]


@pytest.mark.parametrize(("changed", "model", "says"), REFUSED)
def test_what_cannot_be_is_refused_at_construction(changed, model, says):
    config = dataclasses.replace(CONFIG, **changed)
    with pytest.raises(BadConfig, match=says) as found:
        Runtime(model(), config, policy=H2O(budget=20, interval=8))
    assert "\n" not in str(found.value)


def test_keys_by_place_are_refused_with_a_hadamard_transform():
    config = dataclasses.replace(CONFIG, hadamard=True, type_k="int8")
    with pytest.raises(BadConfig, match="leave hadamard or close_up out"):
        Runtime(ToyLm(head_dim=16), config, policy=H2O(budget=20, interval=8, close_up=True))


@pytest.mark.parametrize(("make", "says"), BAD)
def test_bad_settings_are_refused_in_one_line(make, says):
    with pytest.raises(BadConfig, match=says) as found:
        make()
    assert "\n" not in str(found.value)

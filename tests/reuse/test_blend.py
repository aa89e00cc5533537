"""CacheBlend against a dense computation in float64 that knows no cache."""

import dataclasses

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime, SelfExtend
from kvrt.cells import owned
from kvrt.errors import BadConfig, BadSequence, CannotRewind, KvrtError, UsageError
from kvrt.reuse.blend import BlendSpec, to_recompute
from kvrt.runtime.blend import padded_size
from kvrt.runtime.chunks.chunk import CachedChunk
from kvrt.store.kv import read_kv
from tests.marks import slow
from tests.numpy_device.device import installed
from tests.oracle import rotated
from tests.toys import RowModel, ToyLm

N_LAYERS, LEAD = 4, 1
CONFIG = CacheConfig(n_ctx=128, n_seq_max=2, n_ubatch=16, block_size=32)


class Dense:
    """ToyLm in float64: keys unrotated and values of every layer, by rows."""

    def __init__(self, model):
        self.m = model
        self.embedding, self.out = (
            np.asarray(x[...], np.float64) for x in (model.embedding, model.out)
        )
        self.qkv = [np.asarray(x[...], np.float64) for x in model.qkv]

    def project(self, layer, x):
        n, h = self.m.n_heads + self.m.n_kv_heads, self.m.n_heads
        rows = (0.2 * x @ self.qkv[layer]).reshape(len(x), n + self.m.n_kv_heads, -1)
        return rows[:, :h], rows[:, h:n], rows[:, n:]

    def attend(self, q, q_pos, k, v, k_pos, sees=None):
        q, k = rotated(q, q_pos), rotated(k, k_pos)
        sees = q_pos if sees is None else sees
        group = self.m.n_heads // self.m.n_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        s = np.where(np.asarray(k_pos)[None, None] <= np.asarray(sees)[None, :, None], s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", p, v).reshape(len(q), -1)

    def prefill(self, ids):
        x, pos, kv = self.embedding[ids], np.arange(len(ids)), []
        for layer in range(N_LAYERS):
            q, k, v = self.project(layer, x)
            x = x + self.attend(q, pos, k, v, pos)
            kv.append((k, v))
        return x @ self.out * 0.2, kv

    def blend(self, chunks, suffix, spec, by_row=False):
        """Logits of the suffix and what each layer keeps, by the paper's steps.

        With by_row as its code: of m rows the i-th sees all but the last m - i - 1 tokens.
        """
        alone = [self.prefill(c)[1] for c in chunks]
        cut = [0 if i == 0 else LEAD for i in range(len(chunks))]
        ids = np.concatenate([*(c[n:] for c, n in zip(chunks, cut, strict=True)), suffix])
        n, pos = len(ids) - len(suffix), np.arange(len(ids))
        old = [
            [
                np.concatenate([kv[layer][side][m:] for kv, m in zip(alone, cut, strict=True)])
                for side in (0, 1)
            ]
            for layer in range(N_LAYERS)
        ]
        x, kept = self.embedding[ids], []
        for layer in range(spec.check_layer + 1):
            q, k, v = self.project(layer, x)
            x = x + self.attend(q, pos, k, v, pos)
            kept.append((k, v))
        k, v = kept[-1]
        apart = np.stack(
            [
                ((a[:n] - b) ** 2).sum((1, 2))
                for a, b in zip((k, v), old[spec.check_layer], strict=True)
            ]
        )
        sizes = [len(c) - m for c, m in zip(chunks, cut, strict=True)]
        rows = np.concatenate([to_recompute(apart, sizes, spec), np.arange(n, len(ids))])
        x = x[rows]
        for layer in range(spec.check_layer + 1, N_LAYERS):
            q, k, v = self.project(layer, x)
            fused = [np.concatenate([o, np.zeros((len(suffix), *o.shape[1:]))]) for o in old[layer]]
            fused[0][rows], fused[1][rows] = k, v
            sees = pos[-len(rows) :] if by_row else pos[rows]
            x = x + self.attend(q, pos[rows], *fused, pos, sees)
            kept.append(tuple(fused))
        return (x @ self.out * 0.2)[-1], kept, rows[: len(rows) - len(suffix)]


# Texts of which every step is one of 16 tokens, as each of all of them is.
OF_ONE_SIZE = (15, 15, 10)


def texts(seed=0, sizes=(21, 17, 19)):
    rng = np.random.default_rng(seed)
    return [np.array([1, *rng.integers(2, 64, n)], np.int32) for n in sizes], rng.integers(2, 64, 6)


def chunk_of(model, ids, config):
    runtime = Runtime(model, config)
    runtime.prefill(ids.tolist())
    return CachedChunk(snapshot=runtime.snapshot(), n_lead=LEAD)


def blended(model, ids, suffix, spec, config=CONFIG):
    runtime = Runtime(model, config)
    chunks = [chunk_of(model, x, config) for x in ids]
    return runtime, runtime.blend(chunks, suffix.tolist(), spec)


def cached(runtime, layer):
    """Keys and values of sequence 0 by position, from the device's arrays."""
    cells = runtime.group_cells[0]
    mine = np.flatnonzero(owned(cells, 0))
    slots = mine[np.argsort(cells.pos[mine])].astype(np.int32)
    return [np.asarray(x) for x in read_kv(runtime.cache.stores[0], layer, slots)]


def close(got, expected):
    """Equal up to float32, whose rounding the toy's sharp softmax makes larger."""
    apart = np.abs(np.asarray(got) - expected).max() / np.abs(expected).max()
    assert apart < 3e-4, apart


# Where none or all are computed again, no rule chooses.
BLENDS = [
    (0.3, "values", "write"),
    *(slow(0.3, "keys", "write"), slow(0.3, "first", "write"), slow(0.3, "values", "read")),
    *(slow(0.0, "keys", "read"), slow(1.0, "first", "read")),
]


@pytest.mark.parametrize(("ratio", "rule", "rope"), BLENDS)
def test_a_blend_is_what_the_paper_computes(ratio, rule, rope):
    model = ToyLm(n_layers=N_LAYERS)
    ids, suffix = texts()
    spec = BlendSpec(ratio=ratio, rule=rule)
    config = dataclasses.replace(CONFIG, rope=rope)
    runtime, found = blended(model, ids, suffix, spec, config)
    logits, kept, rows = Dense(model).blend(ids, suffix, spec)
    assert found.computed.tolist() == rows.tolist() and found.n_reused == 22 + 17 + 19
    close(found.logits[0], logits)
    for layer, (k, v) in enumerate(kept):
        got_k, got_v = cached(runtime, layer)
        expected = k if rope == "read" else rotated(k, np.arange(len(k)))
        close(got_k, expected)
        close(got_v, v)
    assert runtime.n_exact(0) <= len(ids[0])


def placed(model, ids, config):
    """A runtime with the chunks moved to where they stand in a blend, none computed again."""
    runtime, end = Runtime(model, config), 0
    for i, x in enumerate(ids):
        runtime.restore(chunk_of(model, x, config).snapshot, {0: 1})
        n_lead = LEAD if i else 0
        runtime.seq_rm(1, 0, n_lead)
        runtime.seq_add(1, n_lead, None, end - n_lead)
        runtime.seq_cp(1, 0, end)
        runtime.seq_rm(1)
        end += len(x) - n_lead
    return runtime


@pytest.mark.slow
def test_what_is_not_chosen_stays_to_the_bit():
    model, (ids, suffix) = ToyLm(n_layers=3, head_dim=32), texts(sizes=OF_ONE_SIZE)
    config = dataclasses.replace(CONFIG, rope="read", type_k="q8_0", type_v="q8_0")
    before = placed(model, ids, config)
    runtime, found = blended(model, ids, suffix, BlendSpec(ratio=0.2), config)
    others = np.setdiff1d(np.arange(found.n_reused), found.computed)
    for layer in range(3):
        for old, new in zip(cached(before, layer), cached(runtime, layer), strict=True):
            same = (old[others] == new[others]).all(axis=(1, 2))
            # Layers 0 and 1 are computed for all; what the first caches sees no other token.
            assert same.all() or layer < 2
            assert not same.all() or layer != 1
            if layer > 1:
                assert not (old[found.computed] == new[found.computed]).all()


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
def test_keys_of_the_first_layer_are_those_of_a_fresh_prefill(rope):
    model, (ids, _) = ToyLm(n_layers=N_LAYERS), texts()
    config = dataclasses.replace(CONFIG, rope=rope)
    runtime = Runtime(model, config)
    runtime.prefill(np.concatenate([ids[0], *(x[LEAD:] for x in ids[1:])]).tolist())
    moved = placed(model, ids, config)
    for fresh, old in zip(cached(runtime, 0), cached(moved, 0), strict=True):
        np.testing.assert_allclose(old, fresh, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("check_layer", [0, 1])
def test_the_first_layer_tells_no_tokens_apart_and_none_tells_those_of_a_true_prefix(check_layer):
    """What the first layer caches depends on the token alone, and the first chunk saw all it sees.

    So neither may be what a blend is measured by.
    """
    model, (ids, suffix), seen = ToyLm(n_layers=N_LAYERS), texts(), []

    def none(apart, sizes, n):
        seen.append(apart)
        return np.arange(0)

    blended(model, ids, suffix, BlendSpec(check_layer=check_layer, rule=none))
    (apart,) = seen
    assert apart[:, :22].max() < 1e-6
    later = apart[:, 22:]
    assert later.max() < 1e-6 if check_layer == 0 else later.min() > 1e-3


@pytest.mark.slow
def test_chunks_stay_as_they_are():
    model, (ids, suffix) = ToyLm(n_layers=N_LAYERS), texts()
    runtime = Runtime(model, CONFIG)
    chunks = [runtime.chunk(x[LEAD:].tolist(), lead=[1]) for x in ids]
    assert runtime.seq_pos_max(0) == -1 and [len(x.tokens) for x in chunks] == [22, 18, 20]
    answers, n_compiles = [], []
    for _ in range(2):
        answers.append(runtime.blend(chunks, suffix.tolist()))
        n_compiles.append(runtime.programs.n_compiles)
        assert runtime.token_history(0)[1].tolist() == [*ids[0], *ids[1][1:], *ids[2][1:], *suffix]
        assert runtime.n_exact(0) == 22
        runtime.clear()
    first, second = answers
    assert (np.asarray(first.logits) == np.asarray(second.logits)).all()
    assert first.computed.tolist() == second.computed.tolist()
    # Other chunks and another share of them, within the same tiles, are no other program.
    runtime.blend(chunks[::2], suffix.tolist(), BlendSpec(ratio=0.25))
    assert runtime.programs.n_compiles == n_compiles[0] == n_compiles[1]
    runtime.clear()
    # In another order, and beside a sequence that is not touched.
    runtime.prefill([5, 6, 7], seq_id=1)
    with pytest.raises(BadSequence, match="raise n_seq_max"):
        runtime.blend(chunks[::-1], suffix.tolist())


@pytest.mark.slow
def test_all_tokens_again_are_a_prefill_and_masks_go_by_position():
    model, (ids, suffix) = ToyLm(n_layers=N_LAYERS), texts()
    whole = np.concatenate([ids[0], *(x[LEAD:] for x in ids[1:]), suffix])
    fresh = np.asarray(Runtime(model, CONFIG).prefill(whole.tolist()))

    def apart(spec):
        logits = np.asarray(blended(model, ids, suffix, spec)[1].logits[0])
        return np.abs(logits - fresh).max() / np.abs(fresh).max()

    assert apart(BlendSpec(ratio=1.0)) < 3e-4
    assert apart(BlendSpec(ratio=0.2)) > 1e-3
    spec, dense = BlendSpec(ratio=0.2), Dense(model)
    by_position, by_row = (dense.blend(ids, suffix, spec, by_row=x)[0] for x in (False, True))
    # Rows that see later tokens would be another answer altogether.
    assert np.abs(by_row - by_position).max() > 0.01 * np.abs(fresh).max()


def test_a_chooser_of_ones_own_is_asked():
    model, (ids, suffix) = ToyLm(n_layers=N_LAYERS), texts()

    def last(apart, sizes, n):
        assert apart.shape == (2, 58) and sizes == [22, 17, 19] and n == 11
        return np.arange(58 - n, 58)

    _, found = blended(model, ids, suffix, BlendSpec(ratio=0.2, rule=last))
    assert found.computed.tolist() == list(range(47, 58))


@installed()
@pytest.mark.parametrize(
    ("config", "spec", "message"),
    [
        ({}, {"check_layer": 3}, "at most 2"),
        ({"type_k": "kivi4"}, {}, "scale"),
        ({"self_extend": SelfExtend(ga_n=4, ga_w=16)}, {}, 'use the kind "paper"'),
        ({"n_seq_max": 1}, {}, "raise n_seq_max"),
        ({"n_ctx": 32}, {}, "64"),
    ],
)
def test_what_cannot_be_blended_is_refused(config, spec, message):
    model, (ids, suffix) = ToyLm(n_layers=N_LAYERS, head_dim=32), texts()
    config = dataclasses.replace(CONFIG, **config)
    runtime = Runtime(model, config)
    chunks = [chunk_of(model, x, CONFIG) for x in ids]
    with pytest.raises(KvrtError, match=message) as error:
        runtime.blend(chunks, suffix.tolist(), BlendSpec(**spec))
    assert "\n" not in str(error.value) and runtime.seq_pos_max(0) == -1


@pytest.mark.slow
def test_layers_that_forget_are_refused_and_swa_full_is_not():
    masks = [MaskSpec(), MaskSpec(), MaskSpec(kind="window", size=8)]
    model, (ids, suffix) = ToyLm(n_layers=3, masks=masks), texts(sizes=OF_ONE_SIZE)
    with pytest.raises(CannotRewind, match="swa_full"):
        Runtime(model, CONFIG).chunk([3, 4])
    config = dataclasses.replace(CONFIG, swa_full=True)
    whole = np.concatenate([ids[0], *(x[LEAD:] for x in ids[1:]), suffix])
    fresh = np.asarray(Runtime(model, config).prefill(whole.tolist()))
    close(blended(model, ids, suffix, BlendSpec(ratio=1.0), config)[1].logits[0], fresh)


@pytest.mark.parametrize(
    "wrong", [{"ratio": 1.1}, {"ratio": -0.1}, {"ratio": float("nan")}, {"check_layer": -1}]
)
def test_a_spec_out_of_range_is_refused(wrong):
    with pytest.raises(UsageError):
        BlendSpec(**wrong)


def test_tokens_are_padded_to_tiles_above_the_first():
    sizes = {1: 1, 8: 8, 9: 32, 128: 128, 129: 256, 343: 384, 511: 512, 512: 512}
    assert {n: padded_size(n, 512) for n in sizes} == sizes
    assert padded_size(190, 200) == 200 and padded_size(16, 16) == 16


def test_of_equals_the_earlier_are_chosen():
    apart = np.zeros((2, 10), np.float32)
    apart[1, [7, 3]] = 1
    assert to_recompute(apart, [4, 6], BlendSpec(ratio=0.4)).tolist() == [0, 1, 3, 7]
    assert to_recompute(apart, [4, 6], BlendSpec(ratio=0.4, rule="first")).tolist() == [0, 1, 4, 5]
    assert to_recompute(apart, [4, 6], BlendSpec(ratio=0.0)).tolist() == []


def test_a_model_in_one_piece_is_refused():
    with pytest.raises(BadConfig, match="embed, layers and head"):
        Runtime(RowModel(), CONFIG).chunk([1, 2])

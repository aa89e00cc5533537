"""Sparse reads against a NumPy oracle: which units are chosen, and attention over exactly those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, RopeSpec
from kvrt.attention import BlockView, LayerAttention, LayerKV, TokenQKV, attend
from kvrt.attention.rope import RopeTables
from kvrt.attention.select import choose, labels, lines, read
from kvrt.attention.view import SeqView
from kvrt.errors import BadConfig
from kvrt.options.select import DoubleSparsity, Quest
from kvrt.sizes import store_spec
from kvrt.store import kv as kv_store
from kvrt.store.codec import decode
from tests.marks import first_fast, slow

H, G, D, N_CELLS, N_HIDDEN = 2, 3, 16, 512, 40
GROUP = GroupSpec(layers=(2,), n_kv_heads=H, head_dim=D, rope=None)
CHANNELS = (((0,) * 1,) * H,) * 2 + (((1, 3, 6, 10, 13, 15), (0, 2, 5, 7, 8, 12)),)
SPECS = {
    "quest": Quest(n_cells=96),
    "pooled": DoubleSparsity(n_cells=96, channels=(CHANNELS[2],) * 3),
    "pooled int4": DoubleSparsity(n_cells=96, channels=(CHANNELS[2],) * 3, label_type="int4"),
    "by cell": DoubleSparsity(n_cells=96, channels=(CHANNELS[2],) * 3, by_cell=True),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def stored(select, spec, k, v, pos):
    """A store of all keys and values, those as they are read, and labels of all units."""
    slots = np.arange(N_CELLS, dtype=np.int32)
    kv = kv_store.write_kv(kv_store.create(spec), slots, [k], [v])
    plan = labels.LabelPlan(select=select, layers=((2,),))
    n_blocks = len(pos)
    blocks = np.arange(n_blocks, dtype=np.int32), np.asarray(n_blocks, np.int32)
    (empty,) = plan.create([spec])
    return kv, kv_store.read_kv(kv, 0, slots), labels.rebuild(plan, 0, empty, kv, pos, blocks)[0]


@functools.partial(jax.jit, static_argnums=0)
def units_of(select, view, q, labelled):
    """A view of units, and which of them a layer's heads read, [H, T, K]."""
    units = choose.unit_view(view, GROUP, select)
    return units, choose.choose_units(select, 2, q, labelled, units, GROUP)


write = jax.jit(kv_store.write_kv)
rebuilt = jax.jit(labels.rebuild, static_argnums=(0, 1))
after_write = jax.jit(labels.after_write, static_argnums=(0, 1))


class Case:
    """A store of random keys, some of whose cells are empty or another sequence's and NaN."""

    def __init__(self, select, block_size=64, kv_dtype="f32", n_tokens=1):
        rng = np.random.default_rng(0)
        self.select, self.n_blocks, self.b = select, N_CELLS // block_size, block_size
        k, v = rng.standard_normal((2, N_CELLS, H, D)).astype(np.float32)
        self.pos = np.roll(np.arange(N_CELLS, dtype=np.int32), 37)  # as in a ring
        self.seqs = np.ones(N_CELLS, np.uint32)
        hidden = rng.choice(N_CELLS, N_HIDDEN, replace=False)
        self.pos[hidden[::2]], self.seqs[hidden[::2]], self.seqs[hidden[1::2]] = -1, 0, 2
        config = CacheConfig(
            n_ctx=N_CELLS, block_size=block_size, type_k=kv_dtype, type_v=kv_dtype, select=select
        )
        spec = store_spec(GROUP, config)
        shaped = self.pos.reshape(self.n_blocks, block_size)
        self.kv, read, self.labels = stored(select, spec, k, v, shaped)
        self.k, self.v = (np.asarray(x, np.float64) for x in read)
        self.q = rng.standard_normal((n_tokens, H * G, D)).astype(np.float32) * 2
        own = rng.standard_normal((2, n_tokens, H, D)).astype(np.float32)
        self.own_k, self.own_v = own
        self.q_pos = np.arange(n_tokens, dtype=np.int32) + N_CELLS - 10 * n_tokens

    def view(self):
        rest = {
            "cell_pos": self.pos.reshape(-1, self.b),
            "cell_seqs": self.seqs.reshape(-1, self.b, 1),
            "bits": np.ones((len(self.q), 1), np.uint32),
            "pos": self.q_pos,
        }
        ids = np.arange(self.n_blocks, dtype=np.int32)[::-1]
        if len(self.q) == 1:
            return BlockView(blocks=ids, n_blocks=np.int32(self.n_blocks), **rest)
        n = len(self.q)
        lists = np.tile(ids, (n, 1))
        return SeqView(blocks=lists, n_blocks=np.full(n, self.n_blocks, np.int32), **rest)

    def args(self):
        qkv = TokenQKV(q=self.q, k=self.own_k, v=self.own_v)
        kv = LayerKV(k=self.kv.k[0], v=self.kv.v[0])
        return qkv, kv, self.view(), LayerAttention(group=GROUP)

    def chosen(self):
        """Units as the package chooses them, [H, T, K], and its output."""
        q = np.moveaxis(self.q.reshape(-1, H, G, D), 1, 0)
        units, found = units_of(self.select, self.view(), q, self.labels)
        by = read.Selection(labels=self.labels, units=units)
        return np.asarray(found), np.asarray(read.jitted(self.args(), by, self.select, 2, attend))

    def visible(self, t):
        return (self.seqs == 1) & (self.pos >= 0) & (self.pos <= self.q_pos[t])

    def weights(self, t, h):
        """What each unit counts, by loops in float64."""
        seen, scale = self.visible(t), D**-0.5
        q = self.q[t].reshape(H, G, D)[h].astype(np.float64)
        if isinstance(self.select, Quest):
            bounds = np.full((G, N_CELLS // 16), -np.inf)
            for u in range(N_CELLS // 16):
                cells = np.arange(16 * u, 16 * u + 16)
                held = cells[self.pos[cells] >= 0]
                if seen[cells].any():
                    low, high = self.k[held, h].min(0), self.k[held, h].max(0)
                    bounds[:, u] = np.maximum(q * low, q * high).sum(1) * scale
            return softmax(bounds).sum(0)
        at = list(CHANNELS[2][h])
        keys = self.k[:, h, at]
        if self.select.label_type == "int4":
            keys = np.asarray(decode(self.labels, -2), np.float64)[h].T
        s = np.where(seen, q[:, at] @ keys.T * scale, -np.inf)
        s = s if self.select.by_cell else s.reshape(G, -1, 16).max(2)
        return softmax(s).sum(0)

    def expected(self, t, h):
        """The units that must be read, and those that may be in their place (ties)."""
        weights, unit = self.weights(t, h), self.select.unit
        seen = self.visible(t)
        keep = seen & ((self.pos < self.select.n_sink) | (self.pos >= self.q_pos[t] - 16))
        weights = np.where(keep.reshape(-1, unit).any(1), 1e9, weights)
        weights = np.where(seen.reshape(-1, unit).any(1), weights, -1)
        return weights

    def exact(self, t, ids):
        """Attention of a token over its units of each head and itself, [Q, D]."""
        out = []
        for h in range(H):
            cells = (ids[h][:, None] * self.select.unit + np.arange(self.select.unit)).reshape(-1)
            cells = cells[self.visible(t)[cells]]
            keys = np.concatenate([self.k[cells, h], self.own_k[t, h][None]])
            values = np.concatenate([self.v[cells, h], self.own_v[t, h][None]])
            q = self.q[t].reshape(H, G, D)[h].astype(np.float64)
            out.append(softmax(q @ keys.T * D**-0.5) @ values)
        return np.concatenate(out)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", first_fast(SPECS))
@pytest.mark.parametrize("n_tokens", [1, slow(3)])
def test_units_are_the_oracles_and_attention_over_them_is_exact(name, n_tokens):
    case = Case(SPECS[name], n_tokens=n_tokens)
    found, out = case.chosen()
    for t in range(n_tokens):
        for h in range(H):
            weights = case.expected(t, h)
            ids = found[h, t]
            assert len(set(ids)) == len(ids) == SPECS[name].n_units
            left = np.setdiff1d(np.arange(len(weights)), ids)
            # Equal sets up to ties: nothing that was left out counts more than what was taken.
            assert weights[ids].min() >= weights[left].max() - 1e-6
            assert weights[ids].min() >= 0, "a unit without a visible cell"
        np.testing.assert_allclose(out[t], case.exact(t, found[:, t]), atol=1e-5)


@pytest.mark.parametrize("control", ["random", "recent"])
def test_controls_do_not_pass_for_the_oracle(control):
    case = Case(SPECS["quest"])
    rng, (found, out) = np.random.default_rng(1), case.chosen()
    if control == "random":
        other = [rng.choice(N_CELLS // 16, 6, replace=False) for _ in range(H)]
    else:
        newest = np.where(case.visible(0), case.pos, -1).reshape(-1, 16).max(1)
        other = [np.argsort(-newest)[:6]] * H
    weights = [case.expected(0, h) for h in range(H)]
    assert any(set(other[h]) != set(found[h, 0]) for h in range(H))
    assert any(w[o].min() < w[f[0]].min() for w, o, f in zip(weights, other, found, strict=True))
    assert abs(case.exact(0, other) - out[0]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_what_fits_the_budget_is_read_densely_to_the_bit(name):
    select = SPECS[name]
    many = type(select)(**{**fields(select), "n_cells": N_CELLS})
    case = Case(many)
    dense = np.asarray(attend(*case.args())[0])
    np.testing.assert_array_equal(case.chosen()[1], dense)
    assert abs(Case(select).chosen()[1] - dense).max() > 1e-4


def fields(select):
    return {name: getattr(select, name) for name in select.__dataclass_fields__ if name != "name"}


TYPES = [
    *(("quest", "int8"), ("by cell", "int8"), slow("pooled", "int8")),
    *(slow("quest", "bf16"), slow("by cell", "f16")),
]


@pytest.mark.parametrize(("name", "kv_dtype"), TYPES)
def test_labels_and_reads_take_other_kv_dtypes(name, kv_dtype):
    case = Case(SPECS[name], kv_dtype=kv_dtype)
    found, out = case.chosen()
    for h in range(H):
        weights = case.expected(0, h)
        left = np.setdiff1d(np.arange(len(weights)), found[h, 0])
        assert weights[found[h, 0]].min() >= weights[left].max() - 1e-3
    np.testing.assert_allclose(out[0], case.exact(0, found[:, 0]), atol=1e-5)


def test_foreign_cells_never_matter_whatever_they_hold():
    case = Case(SPECS["pooled"])
    _, out = case.chosen()
    (hidden,) = np.nonzero(~case.visible(0))
    bad = np.full((len(hidden), H, D), np.nan, np.float32)
    case.kv = write(case.kv, hidden.astype(np.int32), [bad], [bad])
    np.testing.assert_array_equal(case.chosen()[1], out)


def test_a_visible_key_that_is_no_number_is_read():
    case = Case(SPECS["quest"])
    (seen,) = np.nonzero(case.visible(0))
    bad = np.full((1, H, D), np.nan, np.float32)
    case.kv = write(case.kv, seen[:1].astype(np.int32), [bad], [bad])
    plan = labels.LabelPlan(select=case.select, layers=((2,),))
    at = jnp.asarray([seen[0] // case.b], jnp.int32), jnp.int32(1)
    shaped = case.pos.reshape(-1, case.b)
    (case.labels,) = rebuilt(plan, 0, (case.labels,), case.kv, shaped, at)
    assert np.isnan(case.chosen()[1]).all()


@pytest.mark.parametrize("name", ["quest", slow("pooled")])
def test_a_step_labels_its_unit_as_a_rebuild_would(name):
    case = Case(SPECS[name])
    plan = labels.LabelPlan(select=case.select, layers=((2,),))
    slots, rng = np.asarray([37, 200, N_CELLS], np.int32), np.random.default_rng(5)
    new = np.asarray(rng.standard_normal((3, H, D)) * 9, np.float32)
    case.kv = write(case.kv, slots, [new], [new])
    case.pos[slots[:2]] = 3
    (got,) = after_write(plan, 0, (case.labels,), case.kv, jnp.asarray(case.pos), slots)
    ids = jnp.arange(case.n_blocks, dtype=jnp.int32), jnp.int32(case.n_blocks)
    shaped = case.pos.reshape(-1, case.b)
    (want,) = rebuilt(plan, 0, (case.labels,), case.kv, shaped, ids)
    np.testing.assert_array_equal(got, want)
    assert (np.asarray(got) != np.asarray(case.labels)).any()


@pytest.mark.parametrize("layout", ["norm", "neox"])
def test_unrotated_keys_are_chosen_and_read_as_they_are_rotated(layout):
    """Of labels the heavy channels, of units all of them; RoPE leaves the last four alone."""
    rng, n_blocks, b = np.random.default_rng(1), 4, 32
    keys = jnp.asarray(rng.standard_normal((n_blocks, H, D, b), np.float32))
    cos, sin = jnp.asarray(rng.standard_normal((2, n_blocks, 6, b), np.float32))
    tables = RopeTables(tokens=cos[:2], cell_cos=cos, cell_sin=sin, layout=layout)
    want = np.stack([tables.rotate_cells(k, jnp.array([i])) for i, k in enumerate(keys)])
    specs = RopeSpec(n_rot=12, layout=layout)
    plan = labels.LabelPlan(select=SPECS["pooled"], layers=((2,),), unrotated=((2, specs),))
    flat = [np.moveaxis(x, 0, 2).reshape(H, D, -1) for x in (keys, want)]
    parts = np.take_along_axis(flat[0], plan.channels(2)[..., None], axis=1)
    heavy = np.take_along_axis(flat[1], np.array(CHANNELS[2])[..., None], axis=1)
    found = tables.rotate_channels(jnp.asarray(parts), CHANNELS[2])
    np.testing.assert_allclose(found, heavy, atol=1e-6)
    units = jnp.asarray(rng.integers(0, n_blocks * b // 16, (H, 3, 2)).astype(np.int32))
    gathered = [labels.gather_units(jnp.asarray(x), units, 16, 3) for x in (keys, want)]
    read_as = tables.rotate_units(gathered[0], units)
    np.testing.assert_allclose(read_as, gathered[1], atol=1e-6)


def test_lines_of_units_are_counted_and_cells_touch_most_of_them():
    rng, n = np.random.default_rng(0), 7168
    every = lines.lines_read(np.arange(n, dtype=np.int32), 256, 64)
    assert every == 2 * n * 64 * 4 // 64
    units = rng.choice(n // 16, n // 128, replace=False)
    cells = (units[:, None] * 16 + np.arange(16)).reshape(-1)
    assert lines.lines_read(cells.astype(np.int32), 256, 64) == every // 8
    single = rng.choice(n, n // 8, replace=False)
    # An eighth of the values' lines, 88 % of the keys'.
    assert 0.45 < lines.lines_read(single.astype(np.int32), 256, 64) / every < 0.55


def test_reads_gather_units_and_not_the_layer():
    case = Case(SPECS["quest"])
    units = choose.unit_view(case.view(), GROUP, case.select)
    q = jnp.moveaxis(jnp.asarray(case.q).reshape(-1, H, G, D), 1, 0)
    found = jnp.asarray(case.chosen()[0])
    text = jax.jit(read.over_units).lower(case.args(), q, found, units).compile().as_text()
    n = case.n_blocks * H * D * case.b
    flops = jax.jit(read.over_units).lower(case.args(), q, found, units).cost_analysis()
    assert "gather" in text or "fusion" in text
    # Scores and sums over the chosen cells alone: masking all would take five times as many.
    assert flops["flops"] < 2 * 2 * H * G * D * N_CELLS / 2, n


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (lambda: Quest(n_cells=100), "multiple of 16"),
        (lambda: Quest(n_cells=32), "raise n_cells to 80"),
        (lambda: Quest(n_cells=96, n_sink=-1), "must not be negative"),
        (lambda: DoubleSparsity(n_cells=96, channels=(((3, 1),),)), "ascending"),
        (lambda: DoubleSparsity(n_cells=96, channels=()), "at least one channel"),
        (lambda: CacheConfig(select=Quest(n_cells=96), rope="read"), "rope='write'"),
        (lambda: CacheConfig(select=Quest(n_cells=96), block_size=24), "multiple of 16"),
        (lambda: CacheConfig(select=Quest(n_cells=96), type_k="kivi4"), "another type"),
        (
            lambda: CacheConfig(select=SPECS["pooled"], type_k="int8", hadamard=True),
            "hadamard",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec, says):
    with pytest.raises(BadConfig, match=says) as raised:
        spec()
    assert "\n" not in str(raised.value)

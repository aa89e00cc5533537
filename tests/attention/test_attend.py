"""The chunked path against the reference and against a double loop in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import GroupSpec, MaskSpec, attention
from kvrt.attention import BlockView, LayerAttention, LayerKV, SeqView, TokenQKV, softmax, xla
from tests.marks import first_fast

H, D, B, N = 2, 8, 4, 5

MASKS = [
    MaskSpec(),
    MaskSpec(kind="window", size=3),
    MaskSpec(kind="window", size=3, n_sink=1),
    MaskSpec(kind="chunked", size=4),
    MaskSpec(kind="symmetric", size=4),
]


def draw(rng, n_tokens, groups, dtype=np.float32):
    """A cache with holes and two sequences, and tokens of both after it."""
    pos = np.full(N * B, -1, np.int32)
    seqs = np.zeros((N * B, 1), np.uint32)
    used = rng.random(N * B) < 0.7
    pos[used] = rng.integers(0, 12, used.sum())
    seqs[used, 0] = rng.integers(1, 4, used.sum())
    rows = [rng.standard_normal(s).astype(dtype) for s in ((N, H, D, B), (N, H, B, D))]
    q, k, v = (rng.standard_normal((n_tokens, h, D)).astype(np.float32) for h in (H * groups, H, H))
    view = BlockView(
        pos=rng.integers(6, 14, n_tokens, np.int32),
        bits=rng.integers(1, 3, (n_tokens, 1), np.uint32),
        blocks=rng.permutation(N).astype(np.int32),
        n_blocks=np.int32(rng.integers(0, N + 1)),
        cell_pos=pos.reshape(N, B),
        cell_seqs=seqs.reshape(N, B, 1),
    )
    return q, k, v, *rows, view


jitted = jax.jit(attention.attend)


def attend(q, k, v, keys, values, view, group, **how):
    tokens, cached = TokenQKV(q=q, k=k, v=v), LayerKV(k=keys, v=values)
    return jitted(tokens, cached, view, LayerAttention(group=group, **how))


def sees(mask, k_pos, q_pos):
    if mask.kind == "symmetric":
        return abs(k_pos - q_pos) <= mask.size // 2
    if k_pos > q_pos:
        return False
    if k_pos < mask.n_sink or mask.kind == "full":
        return True
    start = q_pos - mask.size + 1 if mask.kind == "window" else q_pos // mask.size * mask.size
    return k_pos >= start


def by_hand(q, k, v, k_rows, v_rows, view, group, sinks):
    """One query, one head and one cell at a time, in float64."""
    q, k, v, k_rows, v_rows = (np.asarray(x, np.float64) for x in (q, k, v, k_rows, v_rows))
    listed = view.blocks[: int(view.n_blocks)]
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    for t, h in np.ndindex(*q.shape[:2]):
        kv = h // (q.shape[1] // H)
        cells = [
            (
                int(view.cell_pos[b, c]),
                int(view.cell_seqs[b, c, 0]),
                k_rows[b, kv, :, c],
                v_rows[b, kv, c],
            )
            for b in listed
            for c in range(B)
        ]
        cells += [
            (int(view.pos[i]), int(view.bits[i, 0]), k[i, kv], v[i, kv]) for i in range(len(q))
        ]
        scores, values = [], []
        for pos, seqs, key, value in cells:
            if seqs & int(view.bits[t, 0]) and sees(group.mask, pos, int(view.pos[t])):
                s = key @ q[t, h] * (group.scale or D**-0.5)
                s = group.soft_cap * np.tanh(s / group.soft_cap) if group.soft_cap else s
                scores.append(s)
                values.append(value)
        if sinks is not None:
            scores.append(float(sinks[h]))
            values.append(np.zeros(D))
        scores = np.array(scores)
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ np.array(values) / weights.sum()
        lse[t, h] = scores.max() + np.log(weights.sum())
    return out, lse


# What changes the program, so that many caches share few programs.
FORMS = [
    dict(n_tokens=1, groups=1, cap=None, scale=None, with_sinks=False),
    dict(n_tokens=3, groups=3, cap=2.0, scale=0.7, with_sinks=True),
]


@pytest.mark.parametrize(
    "implementation", ["chunked", pytest.param("reference", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: f"{m.kind}-{m.n_sink}")
@pytest.mark.parametrize("form", FORMS, ids=["plain", "all"])
def test_equals_a_double_loop(implementation, mask, form):
    group = GroupSpec(
        layers=(0,),
        n_kv_heads=H,
        head_dim=D,
        rope=None,
        mask=mask,
        soft_cap=form["cap"],
        scale=form["scale"],
    )
    for seed in range(6):
        rng = np.random.default_rng(seed)
        arrays = draw(rng, form["n_tokens"], form["groups"])
        sinks = rng.standard_normal(H * form["groups"]).astype(np.float32)
        sinks = sinks if form["with_sinks"] else None
        out, lse = attend(*arrays, group, sinks=sinks, implementation=implementation)
        expected = by_hand(*arrays, group, sinks)
        np.testing.assert_allclose(out, expected[0], atol=2e-5)
        np.testing.assert_allclose(lse, expected[1], atol=2e-5)


FULL = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_a_row_that_nobody_sees_never_matters(implementation):
    q, k, v, k_rows, v_rows, view = draw(np.random.default_rng(1), 3, 2)
    clean, _ = attend(q, k, v, k_rows, v_rows, view, FULL, implementation=implementation)
    seen = np.zeros((N, B), bool)
    for t in range(3):
        for b, c in np.ndindex(N, B):
            shared = int(view.cell_seqs[b, c, 0]) & int(view.bits[t, 0])
            seen[b, c] |= bool(shared) and int(view.cell_pos[b, c]) <= int(view.pos[t])
    assert not seen.all()
    k_bad = np.where(seen[:, None, None, :], k_rows, np.float32(np.nan))
    v_bad = np.where(seen[:, None, :, None], v_rows, np.float32(np.nan))
    out, _ = attend(q, k, v, k_bad, v_bad, view, FULL, implementation=implementation)
    np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_a_query_that_sees_nothing_gives_zero(implementation):
    q, k, v, k_rows, v_rows, view = draw(np.random.default_rng(2), 3, 1)
    view.pos[1], view.bits[1] = -1, 0
    out, lse = attend(q, k, v, k_rows, v_rows, view, FULL, implementation=implementation)
    np.testing.assert_array_equal(out[1], 0)
    assert np.all(np.asarray(lse[1]) == softmax.MASKED)
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_rows_are_read_as_they_are(dtype):
    q, k, v, k_rows, v_rows, view = draw(np.random.default_rng(3), 3, 2, dtype)
    exact = attend(q, k, v, k_rows.astype(np.float32), v_rows.astype(np.float32), view, FULL)
    half = attend(q, k, v, k_rows, v_rows, view, FULL)
    np.testing.assert_allclose(half[0], exact[0], atol=1e-6)


@pytest.mark.slow
def test_partial_results_merge():
    rng = np.random.default_rng(4)
    q = jnp.asarray(rng.standard_normal((H, 3, D)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((H, D, 12)), jnp.float32)
    v = jnp.asarray(rng.standard_normal((H, 12, D)), jnp.float32)
    visible = jnp.asarray(rng.random((3, 12)) < 0.8)

    def part(cells):
        s = softmax.scores(q, k[:, :, cells], D**-0.5, None)
        return softmax.add_tile(softmax.empty(H, 3, D), s, v[:, cells], visible[None, :, cells])

    whole = softmax.finish(part(slice(0, 12)))
    merged = softmax.finish(softmax.merge(part(slice(0, 5)), part(slice(5, 12))))
    for a, b in zip(whole, merged, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_unknown_implementation_is_refused():
    arrays = draw(np.random.default_rng(5), 1, 1)
    with pytest.raises(NotImplementedError, match=r"'flash' does not exist; one of chunked, ref"):
        attend(*arrays, FULL, implementation="flash")


# --- rows: every token with blocks of its own ----------------------------------------------------


@pytest.mark.parametrize("mask", first_fast(MASKS[:4], 2), ids=lambda m: f"{m.kind}-{m.n_sink}")
@pytest.mark.parametrize(
    ("implementation", "tile"),
    [
        ("chunked", 8),
        pytest.param("chunked", 4, marks=pytest.mark.slow),
        pytest.param("chunked", 256, marks=pytest.mark.slow),
        pytest.param("reference", 4, marks=pytest.mark.slow),  # it has no tiles
    ],
)
def test_rows_see_what_each_sees_alone(monkeypatch, implementation, mask, tile):
    monkeypatch.setattr(xla, "TILE", tile)
    group = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None, mask=mask, soft_cap=3.0)
    rng = np.random.default_rng(tile)
    q, k, v, k_rows, v_rows, view = draw(rng, 4, 3)
    sinks = rng.standard_normal(H * 3).astype(np.float32)
    tables = np.stack([rng.permutation(N) for _ in range(4)]).astype(np.int32)
    n_blocks = np.array([0, 2, N, 3], np.int32)
    view.pos[3], view.bits[3] = -1, 0
    sight = SeqView(
        pos=view.pos,
        bits=view.bits,
        blocks=tables,
        n_blocks=n_blocks,
        cell_pos=view.cell_pos,
        cell_seqs=view.cell_seqs,
    )
    how = LayerAttention(group=group, sinks=sinks, implementation=implementation)
    tokens, cached = TokenQKV(q=q, k=k, v=v), LayerKV(k=k_rows, v=v_rows)
    # A program of its own: the size of tiles is no argument.
    found = jax.jit(lambda *args: attention.attend(*args))(tokens, cached, sight, how)
    assert np.isfinite(found[0]).all()
    for i in range(3):
        alone = dataclasses.replace(
            view,
            pos=view.pos[i : i + 1],
            bits=view.bits[i : i + 1],
            blocks=tables[i],
            n_blocks=n_blocks[i],
        )
        at = slice(i, i + 1)
        wanted = by_hand(q[at], k[at], v[at], k_rows, v_rows, alone, group, sinks)
        np.testing.assert_allclose(found[0][i], wanted[0][0], atol=2e-5)
        np.testing.assert_allclose(found[1][i], wanted[1][0], atol=2e-5)

"""Many tokens, a piece at a time: equal to the reference, and what nobody sees never matters."""

import dataclasses

import jax
import numpy as np
import pytest

from kvrt import GroupSpec, MaskSpec, attention
from kvrt.attention import BlockView, LayerAttention, LayerKV, TokenQKV
from kvrt.attention.prefill import pieces

H, Q, D, B, N, T, SIZE = 2, 6, 8, 8, 12, 24, 4
MASKS = [
    MaskSpec(),
    MaskSpec(kind="window", size=9),
    MaskSpec(kind="window", size=9, n_sink=2),
    MaskSpec(kind="chunked", size=8),
    MaskSpec(kind="symmetric", size=10),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "MOST", SIZE)
    monkeypatch.setattr(pieces, "LEAST", SIZE)
    # A tile of two blocks.
    monkeypatch.setattr(pieces, "TILE", 2 * B)


def scene(parts):
    """Prompts of (cached, new) tokens, one after the other, in blocks of their own; T tokens."""
    rng = np.random.default_rng(0)
    pos, seqs = np.full((N, B), -1, np.int32), np.zeros((N, B, 1), np.uint32)
    at, bits, block = np.full(T, -1, np.int32), np.zeros((T, 1), np.uint32), 0
    token = 0
    for i, (cached, new) in enumerate(parts):
        for c in range(cached):
            pos[block + c // B, c % B], seqs[block + c // B, c % B] = c, 1 << i
        block += -(-cached // B)
        at[token : token + new] = np.arange(cached, cached + new)
        bits[token : token + new] = 1 << i
        token += new
    view = BlockView(
        pos=at,
        bits=bits,
        blocks=np.array([*range(block), *[N - 1] * (N - block)], np.int32),
        n_blocks=np.int32(block),
        cell_pos=pos,
        cell_seqs=seqs,
    )

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    tokens = TokenQKV(q=normal(T, Q, D), k=normal(T, H, D), v=normal(T, H, D))
    return tokens, LayerKV(k=normal(N, H, D, B), v=normal(N, H, B, D)), view


def run(args, name="chunked", mask=MASKS[0], cap=None, sinks=None):
    group = GroupSpec(
        layers=(0,), n_kv_heads=H, head_dim=D, rope=None, mask=mask, soft_cap=cap, scale=0.7
    )
    how = LayerAttention(group=group, sinks=sinks, implementation=name)
    return [np.asarray(x) for x in attention.attend(*args, how)]


SCENES = {
    "first": [(0, 24)],
    "behind": [(40, 24)],
    "part of a block": [(35, 22)],
    "three prompts": [(17, 7), (0, 9), (30, 6)],
}


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: f"{m.kind}-{m.n_sink}")
@pytest.mark.parametrize("parts", SCENES.values(), ids=SCENES)
def test_equals_the_reference(parts, mask):
    args = scene(parts)
    sinks = np.linspace(-1, 1, Q, dtype=np.float32) if mask.n_sink else None
    cap = 2.0 if mask.kind == "chunked" else None
    found, expected = (run(args, x, mask, cap, sinks) for x in ("chunked", "reference"))
    real = np.asarray(args[2].pos) >= 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a[real], b[real], rtol=2e-6, atol=2e-6)
    assert not found[0][~real].any()


@pytest.mark.parametrize("own", [True, False])
def test_own_tokens_can_be_left_out(own):
    tokens, kv, view = scene(SCENES["behind"])
    args = tokens, kv, dataclasses.replace(view, own=np.asarray(own))
    found, expected = run(args), run(args, "reference")
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("parts", SCENES.values(), ids=SCENES)
def test_what_nobody_sees_never_matters(parts):
    tokens, kv, view = scene(parts)
    expected = run((tokens, kv, view))
    unseen = np.asarray(view.cell_pos) < 0
    k = np.where(unseen[:, None, None], np.nan, kv.k)
    v = np.where(unseen[:, None, :, None], np.nan, kv.v)
    args = tokens, LayerKV(k=k, v=v), view
    for a, b in zip(run(args), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_damaged_key_reaches_only_those_who_see_it():
    # The second prompt has the first cell of its first block damaged; the others stay sound.
    tokens, kv, view = scene(SCENES["three prompts"])
    k = np.array(kv.k)
    k[3, :, :, 0] = np.nan
    owner = np.asarray(view.bits)[:, 0]
    assert np.asarray(view.cell_seqs)[3, 0] == 4
    (out, _), (sound, _) = (
        run((tokens, LayerKV(k=k, v=kv.v), view)),
        run((tokens, kv, view)),
    )
    np.testing.assert_array_equal(out[owner != 4], sound[owner != 4])
    assert np.isnan(out[owner == 4]).all()


def test_tiles_that_are_seen_whole_need_no_mask(monkeypatch):
    """Which tiles are passed by, masked and whole, for each piece."""
    tokens, kv, view = scene(SCENES["behind"])
    found_all = []
    visibility = pieces.mask.visibility

    def recorded(*args):
        found = visibility(*args)
        jax.debug.callback(lambda x: found_all.append(int(x)), found)
        return found

    monkeypatch.setattr(pieces.mask, "visibility", recorded)
    run((tokens, kv, view), mask=MaskSpec(), cap=3.0)
    jax.effects_barrier()
    # Forty cells are two tiles and one with a block that is not listed; own tokens a triangle.
    n = T // SIZE
    assert sorted(found_all) == sorted([2, 2, 1] * n + [1] * n + [0, 2] * (n * (n - 1) // 2))

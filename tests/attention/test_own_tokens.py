"""What devices that divide a cache rely on: tokens may be told not to see themselves.

Each implementation gives the parts over the stored cells and over the step's own tokens, and both
together are the whole.
"""

import dataclasses

import numpy as np
import pytest

from kvrt import GroupSpec, MaskSpec
from kvrt.attention import BlockView, LayerAttention, LayerKV, SeqView, TokenQKV, attend
from kvrt.attention.pallas import attend as pallas_attend
from tests.interpreted import GPU, TPU

T, Q, H, D, B, N = 4, 4, 2, 16, 16, 3
# Those that interpret or run a kernel are tried where they can be.
NAMES = ["chunked", "reference", GPU, TPU]


def views():
    """Tokens of two sequences after eleven cells each; the last block is empty."""
    rng = np.random.default_rng(0)
    pos = np.full((N, B), -1, np.int32)
    pos[0, :11], pos[1, :11] = np.arange(11), np.arange(11)
    seqs = np.zeros((N, B, 1), np.uint32)
    seqs[0, :11], seqs[1, :11] = 1, 2
    cells = {"cell_pos": pos, "cell_seqs": seqs}
    at, bits = np.int32([11, 12, 11, -1]), np.uint32([[1], [1], [2], [0]])
    blocks = np.int32([1, 0, 0])
    listed = BlockView(pos=at, bits=bits, blocks=blocks, n_blocks=np.int32(2), **cells)
    rows = SeqView(
        pos=np.int32([11, 11, 11, -1]),
        bits=bits,
        blocks=np.int32([[0, 0], [0, 0], [1, 0], [0, 0]]),
        n_blocks=np.int32([1, 1, 1, 0]),
        **cells,
    )

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    tokens = TokenQKV(q=normal(T, Q, D), k=normal(T, H, D), v=normal(T, H, D))
    return (listed, rows), (tokens, LayerKV(k=normal(N, H, D, B), v=normal(N, H, B, D)))


WAYS = [(name, which) for name in NAMES for which in ("list", "rows")]
WAYS += [(name, "many") for name in NAMES if "pallas" in name]
SLOW = [pytest.param(*way, marks=pytest.mark.slow) for way in WAYS if "tpu" in way[0]]


@pytest.mark.parametrize(("name", "which"), [*(x for x in WAYS if "tpu" not in x[0]), *SLOW])
def test_own_tokens_and_stored_ones_make_the_whole(name, which, monkeypatch):
    (listed, rows), arrays = views()
    view = rows if which == "rows" else listed
    group = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None, mask=MaskSpec())
    if which == "many":  # a kernel reads the tokens as blocks of two
        monkeypatch.setattr(pallas_attend, "OWN", 2)
        group = dataclasses.replace(group, scale=0.3)  # a program of its own
    nothing = dataclasses.replace(view, n_blocks=np.zeros_like(view.n_blocks))

    def parts(view, own):
        view = dataclasses.replace(view, own=np.asarray(own))
        found = attend(*arrays, view, LayerAttention(group=group, implementation=name))
        return map(np.asarray, found)

    whole, whole_lse = parts(view, True)
    (stored, stored_lse), (own, own_lse) = parts(view, False), parts(nothing, True)
    assert not np.allclose(stored[:3], whole[:3]), "own tokens were seen"
    lse = np.logaddexp(stored_lse, own_lse)
    weights = (np.exp(x - lse)[:, :, None] for x in (stored_lse, own_lse))
    both = sum(w * x for w, x in zip(weights, (stored, own), strict=True))
    # The last token is padding.
    np.testing.assert_allclose(both[:3], whole[:3], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse[:3], whole_lse[:3], rtol=2e-6, atol=2e-6)
    assert not stored[3].any()


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("own", [True, False])
def test_one_token_alone_gets_what_the_reference_gives(at, own):
    (listed, _), (tokens, kv) = views()
    one = slice(at, at + 1)
    view = dataclasses.replace(
        listed, pos=listed.pos[one], bits=listed.bits[one], own=np.asarray(own)
    )
    tokens = TokenQKV(q=tokens.q[one], k=tokens.k[one], v=tokens.v[one])
    group = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None, mask=MaskSpec())
    found, wanted = (
        attend(tokens, kv, view, LayerAttention(group=group, implementation=name))
        for name in ("chunked", "reference")
    )
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_a_key_that_is_no_number_reaches_its_own_token():
    (listed, _), (tokens, kv) = views()
    view = dataclasses.replace(
        listed, pos=listed.pos[:1], bits=listed.bits[:1], n_blocks=np.int32(0)
    )
    tokens = TokenQKV(q=tokens.q[:1], k=tokens.k[:1], v=tokens.v[:1])
    tokens.k[0, 1, 2] = np.nan
    group = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None, mask=MaskSpec())
    out, _ = attend(tokens, kv, view, LayerAttention(group=group))
    # Two query heads read each kv head.
    assert np.isnan(out[0]).all(axis=1).tolist() == [False, False, True, True]

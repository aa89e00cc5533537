"""SelfExtend as the paper has it, against one pair at a time in NumPy."""

import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec, Runtime, SelfExtend
from kvrt.errors import BadConfig
from tests.marks import full, slow
from tests.oracle import rope
from tests.toys import RowModel, allclose, tables

N_VOCAB, D = 32, 8
ROPE = RopeSpec(n_rot=D, base=1e4)
GROUP = GroupSpec(layers=(0,), n_kv_heads=2, head_dim=D, rope=ROPE)
TOKENS = [(7 * i + i // 5) % N_VOCAB for i in range(40)]


def by_hand(model, tokens, n, w):
    """Each query against each key by two loops, all in float64."""
    q, k, v = (np.asarray(x, np.float64)[tokens] for x in tables(model))
    out = np.zeros(q.shape)

    def turned(x, pos):
        return rope(x, pos, n_rot=D, base=ROPE.base)

    for p, h in np.ndindex(*q.shape[:2]):
        scores = []
        for r in range(p + 1):
            key = k[r, h // (q.shape[1] // k.shape[1])][None]
            if p - r < w:
                a, b = turned(q[p, h][None], p), turned(key, r)
            else:
                a, b = turned(q[p, h][None], p // n + w - w // n), turned(key, r // n)
            scores.append(float(a[0] @ b[0]) * D**-0.5)
        weights = np.exp(np.array(scores) - max(scores))
        values = v[: p + 1, h // (q.shape[1] // k.shape[1])]
        out[p, h] = weights @ values / weights.sum()
    return out.reshape(len(tokens), -1)


def runtime(extend, **change):
    config = dict(n_ctx=48, n_seq_max=2, block_size=8, n_ubatch=16, rope="read")
    config |= dict(self_extend=extend) | change
    return Runtime(RowModel(n_vocab=N_VOCAB, group=GROUP), CacheConfig(**config))


def logits(at, parts):
    out, start = [], 0
    for n in parts:
        part = TOKENS[start : start + n]
        out.append(np.asarray(at.append(part, out_ids=range(len(part)))))
        start += n
    assert start == len(TOKENS)
    return np.concatenate(out)


@pytest.mark.parametrize(
    ("n", "w", "attention"),
    [
        (3, 7, "chunked"),
        *(slow(2, 6, "chunked"), slow(4, 8, "chunked"), slow(4, 1, "reference")),
        *(full(n, w, "reference") for n, w in ((3, 7), (2, 6), (4, 8))),
        full(4, 1, "chunked"),
    ],
)
def test_prefill_and_decode_see_what_the_paper_says(n, w, attention):
    extend = SelfExtend(ga_n=n, ga_w=w, kind="paper")
    at = runtime(extend, attention=attention)
    expected = by_hand(RowModel(n_vocab=N_VOCAB, group=GROUP), TOKENS, n, w)
    # A whole step, an odd one, single tokens (which take another path), and a last long one.
    got = logits(at, [16, 5, 1, 1, 1, 16])
    assert np.abs(got - expected).max() < 1e-4
    # Positions and rows are those of a plain cache.
    assert at.cells.pos[:40].tolist() == list(range(40))
    if w > 1:
        plain = by_hand(RowModel(n_vocab=N_VOCAB, group=GROUP), TOKENS, 1, w)
        assert np.abs(plain[:w] - expected[:w]).max() == 0 < np.abs(plain - expected).max()


@pytest.mark.slow
def test_groups_of_one_and_long_windows_are_plain_attention():
    plain = logits(runtime(None), [16, 1, 16, 7])
    for n, w in ((1, 5), (4, 40)):
        extend = SelfExtend(ga_n=n, ga_w=w, kind="paper")
        allclose(logits(runtime(extend), [16, 1, 16, 7]), plain, 1e-5)


@pytest.mark.slow
def test_sequences_decode_together_as_they_do_alone():
    extend = SelfExtend(ga_n=2, ga_w=6, kind="paper")
    at = runtime(extend, n_ctx=64)
    at.append(TOKENS[:20], 0)
    at.append(TOKENS[5:17], 1)
    both = at.decode({0: 3, 1: 9})
    for seq, tokens, token in ((0, TOKENS[:20], 3), (1, TOKENS[5:17], 9)):
        alone = runtime(extend)
        alone.append(tokens)
        allclose(both[seq], alone.decode({0: token})[0], 1e-5)


@pytest.mark.parametrize("n_tokens", [slow(36), 40])
def test_both_kinds_agree_where_their_windows_do(n_tokens):
    """Of 36 and of 40 tokens the cache's kind has left 4 and 8 alone: the paper's windows then."""
    n, w = 4, 8
    inside = runtime(SelfExtend(ga_n=n, ga_w=w))
    for token in TOKENS[:n_tokens]:
        last = inside.append([token])
    alone = n_tokens - 32
    assert inside.cells.pos[n_tokens - 1] == 32 // n + alone - 1
    paper = runtime(SelfExtend(ga_n=n, ga_w=alone, kind="paper"))
    for token in TOKENS[:n_tokens]:
        expected = paper.append([token])
    allclose(last, expected, 1e-5)


@pytest.mark.slow
def test_one_program_for_any_length():
    at = runtime(SelfExtend(ga_n=2, ga_w=6, kind="paper"))
    at.append(TOKENS[:3])
    at.append([1])
    n = at.programs.n_compiles
    for token in TOKENS[:36]:
        at.append([token])
    assert at.programs.n_compiles == n


@pytest.mark.slow
def test_a_model_of_windowed_layers_alone_is_refused():
    window = GroupSpec(
        layers=(0,), n_kv_heads=2, head_dim=D, rope=ROPE, mask=MaskSpec(kind="window", size=4)
    )
    extend = SelfExtend(ga_n=2, ga_w=6, kind="paper")
    with pytest.raises(BadConfig, match=r"the first is 0; use a model without such layers$"):
        Runtime(RowModel(group=window), CacheConfig(n_ctx=8, rope="read", self_extend=extend))

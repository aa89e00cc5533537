"""SelfExtend as the paper has it, against one pair at a time in NumPy."""

import dataclasses

import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec, Runtime, SelfExtend
from kvrt.errors import BadConfig
from kvrt.store import rope as of_store
from tests.marks import slow
from tests.store import plaincodec
from tests.toys import RowModel, allclose, tables

N_VOCAB, D = 32, 8
ROPE = RopeSpec(n_rot=D, base=1e4)
YARN = RopeSpec(n_rot=D, base=1e4, scaling="yarn", factor=4.0, n_ctx_orig=16)
GROUP = GroupSpec(layers=(0,), n_kv_heads=2, head_dim=D, rope=ROPE)
TOKENS = [(7 * i + i // 5) % N_VOCAB for i in range(40)]
# A whole step, an odd one, single tokens (which take another path), and a last long one.
PARTS = [16, 5, 1, 1, 1, 16]


def rotated(x, pos, spec):
    """One head by one angle a pair, halves of the channels as pairs."""
    theta = pos * of_store.frequencies(spec, 48).astype(np.float64)
    a, b = np.split(x, 2)
    return np.concatenate(
        [a * np.cos(theta) - b * np.sin(theta), a * np.sin(theta) + b * np.cos(theta)]
    )


def by_hand(n, w, *, spec=ROPE, rope="read", dtype="f32", parts=PARTS):
    """Each query against each key by two loops, all in float64.

    What earlier steps wrote is as it was stored, what the step itself has is as it was computed.
    """
    q, k, v = (np.asarray(x, np.float64)[TOKENS] for x in tables(model_of(spec)))
    starts, scale = np.repeat(np.cumsum([0, *parts[:-1]]), parts), of_store.magnitude(spec, 48)
    out = np.zeros(q.shape)

    def stored(x):
        exact = dtype == "f32" or not len(x)
        return x if exact else plaincodec.coded(x, dtype).astype(np.float64)

    def key_at(key, pos, to, is_stored):
        if not is_stored:
            return rotated(key, to, spec) * scale
        if rope == "read":
            return rotated(stored(key), to, spec) * scale
        # The magnitude is in what was stored.
        return rotated(stored(rotated(key, pos, spec) * scale), to - pos, spec)

    for p, h in np.ndindex(*q.shape[:2]):
        scores, kv, before = [], h // (q.shape[1] // k.shape[1]), starts[p]
        for r in range(p + 1):
            at, to = (p, r) if p - r < w else (p // n + w - w // n, r // n)
            key = key_at(k[r, kv], r, to, r < before)
            scores.append(float(rotated(q[p, h], at, spec) * scale @ key) * D**-0.5)
        weights = np.exp(np.array(scores) - max(scores))
        values = np.concatenate([stored(v[:before, kv]), v[before : p + 1, kv]])
        out[p, h] = weights @ values / weights.sum()
    return out.reshape(len(TOKENS), -1)


def model_of(spec):
    return RowModel(n_vocab=N_VOCAB, group=dataclasses.replace(GROUP, rope=spec))


def runtime(extend, spec=ROPE, **change):
    config = dict(n_ctx=48, n_seq_max=2, block_size=8, n_ubatch=16, rope="read")
    config |= dict(self_extend=extend) | change
    return Runtime(model_of(spec), CacheConfig(**config))


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
    ],
)
def test_prefill_and_decode_see_what_the_paper_says(n, w, attention):
    extend = SelfExtend(ga_n=n, ga_w=w, kind="paper")
    at = runtime(extend, attention=attention)
    expected = by_hand(n, w)
    got = logits(at, PARTS)
    assert np.abs(got - expected).max() < 1e-4
    # Positions and rows are those of a plain cache.
    assert at.cells.pos[:40].tolist() == list(range(40))
    if w > 1:
        plain = by_hand(1, w)
        assert np.abs(plain[:w] - expected[:w]).max() == 0 < np.abs(plain - expected).max()


@pytest.mark.parametrize(
    ("rope", "dtype", "attention", "spec"),
    [
        ("write", "int8", "chunked", YARN),
        *(slow("write", "f32", "chunked", ROPE), slow("write", "int8", "reference", ROPE)),
        *(slow("read", "int8", "chunked", YARN), slow("write", "f32", "reference", YARN)),
    ],
    ids=lambda x: x if isinstance(x, str) else x.scaling,
)
def test_keys_are_rotated_from_where_they_are_stored(rope, dtype, attention, spec):
    """Stored rotated, and rounded then, a key moves on; its magnitude is not applied again."""
    extend = SelfExtend(ga_n=3, ga_w=7, kind="paper")
    types = dict(type_k=dtype, type_v=dtype)
    got = logits(runtime(extend, spec, rope=rope, attention=attention, **types), PARTS)
    expected = by_hand(3, 7, spec=spec, rope=rope, dtype=dtype)
    assert np.abs(got - expected).max() < 1e-4
    # The control: which of rounding and rotating comes first is seen.
    if dtype == "int8":
        other = by_hand(3, 7, spec=spec, rope="read" if rope == "write" else "write", dtype=dtype)
        assert np.abs(other - expected).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["read", "write"])
def test_groups_of_one_and_long_windows_are_plain_attention(rope):
    plain = logits(runtime(None, rope=rope), [16, 1, 16, 7])
    for n, w in ((1, 5), (4, 40)):
        extend = SelfExtend(ga_n=n, ga_w=w, kind="paper")
        allclose(logits(runtime(extend, rope=rope), [16, 1, 16, 7]), plain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["read", "write"])
def test_a_moved_sequence_is_compared_where_it_is(rope):
    """What a K-shift has moved: positions 3 on are 2 less, with a hole before them filled."""
    extend = SelfExtend(ga_n=3, ga_w=7, kind="paper")
    at = runtime(extend, YARN, rope=rope)
    at.append(TOKENS[:30])
    at.seq_rm(0, 3, 5)
    at.seq_add(0, 5, None, -2)
    again = runtime(extend, YARN, rope=rope)
    again.append([*TOKENS[:3], *TOKENS[5:30]])
    allclose(at.append(TOKENS[30:33]), again.append(TOKENS[30:33]), 1e-5)
    allclose(at.append([1]), again.append([1]), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["read", "write"])
def test_sequences_decode_together_as_they_do_alone(rope):
    extend = SelfExtend(ga_n=2, ga_w=6, kind="paper")
    at = runtime(extend, n_ctx=64, rope=rope)
    at.append(TOKENS[:20], 0)
    at.append(TOKENS[5:17], 1)
    both = at.decode({0: 3, 1: 9})
    for seq, tokens, token in ((0, TOKENS[:20], 3), (1, TOKENS[5:17], 9)):
        alone = runtime(extend, rope=rope)
        alone.append(tokens)
        allclose(both[seq], alone.decode({0: token})[0], 1e-5)


@pytest.mark.parametrize(("n_tokens", "rope"), [slow(36, "read"), slow(40, "write"), (40, "read")])
def test_both_kinds_agree_where_their_windows_do(n_tokens, rope):
    """Of 36 and of 40 tokens the cache's kind has left 4 and 8 alone: the paper's windows then."""
    n, w = 4, 8
    inside = runtime(SelfExtend(ga_n=n, ga_w=w))
    for token in TOKENS[:n_tokens]:
        last = inside.append([token])
    alone = n_tokens - 32
    assert inside.cells.pos[n_tokens - 1] == 32 // n + alone - 1
    paper = runtime(SelfExtend(ga_n=n, ga_w=alone, kind="paper"), rope=rope)
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
        Runtime(RowModel(group=window), CacheConfig(n_ctx=8, self_extend=extend))

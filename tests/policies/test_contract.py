"""What every policy owes: a new one joins by its line in POLICIES, and sizes here."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrt import CacheConfig, Runtime
from kvrt import cells as kc
from kvrt.errors import BadConfig, CacheFull
from kvrt.policies import POLICIES, AttentionSinks
from kvrt.runtime.generate import After
from tests.oracle import Oracle, rope
from tests.toys import RowModel, ToyLm, tables

pytestmark = pytest.mark.usefixtures("numpy_device")

N_CTX, N_KEEP = 24, 3
SIZES = {
    "context_shift": [dict(n_keep=N_KEEP), dict(n_keep=N_KEEP, n_discard=2)],
    "attention_sinks": [dict(n_sink=N_KEEP, n_window=9), dict(n_sink=N_KEEP, n_window=9, n_drop=4)],
}
CASES = [(name, sizes) for name, all_sizes in SIZES.items() for sizes in all_sizes]
every = pytest.mark.parametrize(("name", "sizes"), CASES)


def test_every_policy_is_tried():
    assert set(SIZES) == set(POLICIES)


@every
@given(n_past=st.integers(0, 60), n_new=st.integers(1, 12), n_free=st.integers(0, 30))
def test_a_drop_keeps_the_first_and_does_some_good(name, sizes, n_past, n_new, n_free):
    policy = POLICIES[name](**sizes)
    assert policy.n_keep == N_KEEP
    drop = policy.drop(n_past, n_new)
    if drop is None:
        assert n_past <= N_KEEP + 1
        return
    assert N_KEEP == drop.p0 < drop.p1 <= n_past and drop.n == drop.p1 - drop.p0
    assert policy.n_fit(n_free + drop.n, n_past - drop.n) > policy.n_fit(n_free, n_past)


def runtime(policy, mode, n_ctx=N_CTX, model=None, **more):
    config = CacheConfig(n_ctx=n_ctx, n_seq_max=2, block_size=8, n_ubatch=8, rope=mode, **more)
    return Runtime(model or ToyLm(n_layers=1), config, policy=policy)


@every
@pytest.mark.parametrize("mode", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_text_goes_on_and_what_was_dropped_is_told(name, sizes, mode):
    at = runtime(POLICIES[name](**sizes), mode)
    n_prompt = 40  # longer than the cache
    at.append([(5 * i + 1) % 64 for i in range(n_prompt)])
    written = [t.id for t in at.generate(40, stride=4)]
    assert len(written) == 40
    stats = at.stats()
    assert stats.n_dropped == sum(d.n_dropped for d in stats.drops) > 0
    # Each token that came in is in the cache or was dropped; the last one is not in yet.
    assert stats.cells_used + stats.n_dropped == n_prompt + 39
    pos = np.sort(at.cells.pos[at.cells.pos >= 0])
    assert pos.tolist() == list(range(len(pos)))
    if name == "attention_sinks":
        assert len(pos) <= N_KEEP + 9


@every
@pytest.mark.slow
def test_both_key_frames_and_any_stride_write_the_same(name, sizes):
    texts = set()
    for mode, stride in (("write", 1), ("read", 16)):
        at = runtime(POLICIES[name](**sizes), mode)
        at.append(list(range(30)))
        texts.add(tuple(t.id for t in at.generate(30, stride=stride)))
    assert len(texts) == 1


def kept_by_hand(policy, kept, token):
    """What a list of tokens is after one more: the policy's words, and slices."""
    while policy.n_fit(N_CTX - len(kept), len(kept)) < 1:
        drop = policy.drop(len(kept), 1)
        kept = kept[: drop.p0] + kept[drop.p1 :]
    return [*kept, token]


FEEDS = {
    "append": lambda at, t: at.append([t])[0],
    "decode": lambda at, t: at.decode({0: t})[0],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    CASES[:4],
)
def test_every_way_in_holds_the_same_cells_and_gives_the_same_tokens(name, sizes):
    """append, decode, generate and strides, token by token, against a list that is cut by hand."""
    policy, prompt = POLICIES[name](**sizes), [(5 * i + 1) % 64 for i in range(7)]
    model = ToyLm(n_layers=1)

    def at():
        found = runtime(policy, "write", model=model)
        found.append(prompt)
        return found

    written, kept, ends = [], prompt, {}
    for token in (single := at()).generate(40):
        held = single.token_history()[1].tolist()
        kept = kept_by_hand(policy, kept, written[-1]) if written else kept
        assert held == kept and kc.n_used(single.cells) == len(kept)
        written.append(token.id)
    ends["generate"] = held
    strided = at()
    assert [t.id for t in strided.generate(40, stride=5)] == written
    ends["stride"] = strided.token_history()[1].tolist()
    for how, feed in FEEDS.items():
        fed, seen = at(), []
        for token in written[:-1]:
            seen.append(int(np.argmax(feed(fed, token))))
            if name == "attention_sinks":
                assert kc.n_used(fed.cells) <= N_KEEP + 9
        assert seen == written[1:]
        ends[how] = fed.token_history()[1].tolist()
        assert fed.stats().n_dropped == single.stats().n_dropped
    assert all(end == kept for end in ends.values())


@pytest.mark.slow
@every
def test_several_sequences_in_one_decode_have_room_each(name, sizes):
    """Logits of every step against the oracle over what a list cut by hand holds."""
    policy, model = POLICIES[name](**sizes), RowModel(n_vocab=64)
    at = runtime(policy, "write", model=model, n_ctx=2 * N_CTX)
    kept = {0: [1, 2, 3, 4, 5], 1: [9, 8]}
    for s, tokens in kept.items():
        at.append(tokens, s)
    for i in range(40):
        tokens = {0: (7 * i + 2) % 64, 1: (3 * i + 5) % 64}
        out = at.decode(tokens)
        for s, token in tokens.items():
            if name == "attention_sinks":
                now = kept[s] = kept_by_hand(policy, kept[s], token)
                assert len(now) <= N_KEEP + 9
            else:  # Both share the empty cells: when each drops is counted, what goes is known.
                kept[s] = [*kept[s], token]
                n_gone = sum(d.n_dropped for d in at.stats().drops if d.seq_id == s)
                now = kept[s][:N_KEEP] + kept[s][N_KEEP + n_gone :]
            assert at.token_history(s)[1].tolist() == now
            np.testing.assert_allclose(out[s], attended(model, now), atol=1e-4)
    assert at.stats().n_dropped > 0 and kc.n_used(at.cells) <= 2 * N_CTX


def attended(model, tokens):
    """Logits of the last of some tokens, by the oracle."""
    q, k, v = tables(model)
    oracle, group = Oracle(), model.group
    oracle.append(0, range(len(tokens)), [(k[t], v[t]) for t in tokens])

    def turn(x, pos):
        return rope(x, pos, n_rot=group.rope.n_rot, base=group.rope.base)

    last = [len(tokens) - 1]
    out = oracle.attend(0, q[tokens[-1:]], last, group.mask, group.head_dim**-0.5, turn)
    return out.reshape(-1)


@every
def test_a_decode_that_cannot_fit_leaves_no_trace(name, sizes):
    """One sequence has a token to give, the other none, and two cells are wanted."""
    at = runtime(POLICIES[name](**sizes), "write", n_ctx=N_KEEP + 4)
    at.append(list(range(N_KEEP)))
    at.append(list(range(4)), 1)
    before = [x.tobytes() for x in (at.cells.pos, at.cells.seqs)], at.stats()
    with pytest.raises(CacheFull):
        at.decode({0: 1, 1: 2})
    assert ([x.tobytes() for x in (at.cells.pos, at.cells.seqs)], at.stats()) == before


@every
def test_a_fill_behind_the_end_that_a_policy_would_drop_for_is_refused(name, sizes):
    at = runtime(POLICIES[name](**sizes), "write")
    at.append(list(range(10)))
    with pytest.raises(CacheFull, match="before some have to go; append them"):
        at.fill([1] * 13, 0, 11)
    assert at.seq_pos_max() == 9


@every
def test_what_was_restored_beyond_the_window_shrinks_with_the_next_token(name, sizes):
    """More than a policy would hold: the first token of every kind makes the room."""
    full, held = runtime(None, "write"), []
    full.append([(3 * i) % 64 for i in range(22)])
    taken = full.snapshot()
    for feed in (
        *FEEDS.values(),
        lambda at, t: list(at.generate(1, after=After(token=t, n_sampled=1))),
    ):
        at = runtime(POLICIES[name](**sizes), "write")
        at.restore(taken)
        feed(at, 5)
        held.append(at.token_history()[1].tolist())
        if name == "attention_sinks":
            assert kc.n_used(at.cells) <= N_KEEP + 9
    assert held[0] == held[1] == held[2]


@every
def test_a_prompt_that_cannot_be_read_in_parts_leaves_no_trace(name, sizes):
    at = runtime(POLICIES[name](**sizes), "write")
    at.append(list(range(6)))
    at.seq_cp(0, 1)
    before = [x.tobytes() for x in (at.cells.pos, at.cells.seqs)], at.stats()
    with pytest.raises(CacheFull):
        at.append(list(range(50)))
    assert ([x.tobytes() for x in (at.cells.pos, at.cells.seqs)], at.stats()) == before


@pytest.mark.slow
def test_sinks_hold_the_first_tokens_and_the_newest():
    """The cells after 30 tokens are those of a list that is cut by hand."""
    at = runtime(POLICIES["attention_sinks"](n_sink=2, n_window=6), "read")
    kept = []
    for token in range(30):
        at.append([token])
        kept = [*kept[:2], *kept[2:][-5:], token]
    held = sorted((int(p), c) for c, p in enumerate(at.cells.pos) if p >= 0)
    assert [p for p, _ in held] == list(range(8)) and kept == [0, 1, *range(24, 30)]
    fresh = runtime(None, "read")
    fresh.append(kept)
    # One layer: keys and values depend on their token alone, so the same text gives the same.
    np.testing.assert_allclose(at.probe([9]), fresh.probe([9]), atol=1e-5)
    assert kc.n_used(at.cells) == 8


@pytest.mark.parametrize(
    "bad", [dict(n_window=1), dict(n_window=8, n_sink=-1), dict(n_window=8, n_drop=8)]
)
def test_bad_windows_are_refused(bad):
    with pytest.raises(BadConfig, match="n_window at least 2 and n_drop from 1 to below"):
        POLICIES["attention_sinks"](**bad)


def test_sinks_are_no_wider_for_what_others_share():
    """A drop would copy more cells than are empty: refused, where it went on beyond the window."""
    at = Runtime(
        RowModel(),
        CacheConfig(n_ctx=64, n_seq_max=3, block_size=16),
        policy=AttentionSinks(n_sink=2, n_window=30),
    )
    at.append(list(range(30)))
    at.seq_cp(0, 1)
    at.append(list(range(5)), 2)
    at.append([1, 2], 0)
    before = at.token_history(0)[0].tolist(), at.n_free
    assert before == (list(range(32)), 27)
    with pytest.raises(
        CacheFull, match="may get 0 more and 1 are wanted; a drop would copy 27 cells"
    ):
        at.append([3], 0)
    assert (at.token_history(0)[0].tolist(), at.n_free) == before

"""What every policy owes: a new one joins by its line in POLICIES, and sizes here."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import ToyLm

from kvrt import CacheConfig, Runtime
from kvrt import cells as kc
from kvrt.errors import BadConfig, CacheFull
from kvrt.policies import POLICIES

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


def runtime(policy, mode, n_ctx=N_CTX):
    config = CacheConfig(n_ctx=n_ctx, n_seq_max=2, block_size=8, n_ubatch=8, rope=mode)
    return Runtime(ToyLm(n_layers=1), config, policy=policy)


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

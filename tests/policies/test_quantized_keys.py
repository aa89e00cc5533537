"""What evictions leave of keys that are stored rotated in few bits, against float64."""

import numpy as np
import pytest

from kvrt import AttentionSinks, CacheConfig, ContextShift, GroupSpec, RopeSpec, Runtime
from kvrt import cells as kc
from kvrt.store import kv as kv_store
from tests.oracle import rope
from tests.toys import RowModel, tables

pytestmark = pytest.mark.slow

D, N_SINK = 32, 4
N_TOKENS = 120  # enough for several evictions by either policy
GROUP = GroupSpec(layers=(0,), n_kv_heads=2, head_dim=D, rope=RopeSpec(n_rot=D))
MODEL = RowModel(n_vocab=256, n_heads=2, head_dim=D, group=GROUP)
# Of keys that were quantized again by evictions, in errors of keys that were quantized once.
BOUND = 2.0


def runtime(kind, n_window, mode="write", policy=None):
    sinks = AttentionSinks(n_sink=N_SINK, n_window=n_window)
    config = CacheConfig(n_ctx=n_window + 32, block_size=32, n_ubatch=32, type_k=kind, rope=mode)
    return Runtime(MODEL, config, policy=policy or sinks)


def tokens(n):
    return np.random.default_rng(0).integers(0, 256, n).tolist()


def error(at):
    """Root of the mean square of the errors of all keys held, relative to the keys."""
    at.flush()
    pos, ids = at.token_history()
    cell_of = {int(p): c for c, p in enumerate(at.cells.pos) if p >= 0}
    order = np.array([cell_of[int(p)] for p in pos], np.int32)
    k = tables(MODEL)[1]
    found = np.asarray(kv_store.read_kv(at.cache.stores[0], 0, order)[0], np.float64)
    wanted = np.stack([turned(k[i], p, at.config.rope) for i, p in zip(ids, pos, strict=True)])
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def turned(key, pos, mode):
    exact = np.asarray(key, np.float64)
    return exact if mode == "read" else rope(exact, int(pos), n_rot=D)


def evicted(at, n_window, n):
    """Errors when the window is full, and after n more tokens, one at a time."""
    text = tokens(n_window + N_SINK + n)
    at.append(text[: n_window + N_SINK])
    before = error(at)
    for token in text[n_window + N_SINK :]:
        at.append([token])
        assert kc.n_used(at.cells) <= n_window + N_SINK
    return before, error(at)


@pytest.mark.parametrize("kind", ["int4", "bf16"])
def test_evictions_of_rounded_keys_are_batched(kind):
    """The bound on the error, and the bounds on the cells held, of a window of 32."""
    at = runtime(kind, 32)
    before, after = evicted(at, 32, 100)
    assert after < BOUND * before
    assert {d.n_dropped for d in at.stats().drops} == {8}
    assert at.stats().n_kshift == len(at.stats().drops) == 13


def test_evictions_of_exact_keys_stay_single():
    for kind, mode in (("f32", "write"), ("int8", "read"), ("bf16", "read")):
        at = runtime(kind, 32, mode)
        before, after = evicted(at, 32, 20)
        assert {d.n_dropped for d in at.stats().drops} == {1}
        assert kc.n_used(at.cells) == 32 + N_SINK
        assert after < 1.2 * before + 1e-5


def test_every_policy_and_way_in_batches():
    for policy in (None, ContextShift(n_keep=N_SINK, n_discard=1)):
        ends = []
        for feed in (
            lambda at, t: at.append([t]),
            lambda at, t: at.decode({0: t}),
        ):
            at = runtime("int4", 32, policy=policy)
            before = None
            for token in tokens(N_TOKENS):
                feed(at, token)
                before = error(at) if before is None and kc.n_used(at.cells) == 30 else before
            assert error(at) < BOUND * before
            assert at.stats().n_kshift < N_TOKENS / 6
            ends.append((at.token_history()[1].tolist(), at.stats().drops))
        assert ends[0] == ends[1]
        at = runtime("int4", 32, policy=policy)
        at.append([1])
        written = [t.id for t in at.generate(N_TOKENS, stride=5)]
        single = runtime("int4", 32, policy=policy)
        single.append([1])
        assert [t.id for t in single.generate(N_TOKENS)] == written


def test_the_bound_holds_after_a_thousand_tokens(monkeypatch):
    """And what it keeps away: int4 keys whose neighbours go one at a time are noise."""
    before, after = evicted(runtime("int4", 256), 256, 1000)
    assert after < BOUND * before < 0.2
    monkeypatch.setattr("kvrt.policies.drops._PARTS", 256)
    assert evicted(runtime("int4", 256), 256, 1000)[1] > 1

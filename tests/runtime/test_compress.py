"""A prompt that is compressed once, after it was read whole."""

import dataclasses

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime
from kvrt.errors import UsageError
from kvrt.policies.scored import H2O, SnapKV
from kvrt.runtime.compress import compress_prompt
from tests.toys import ToyLm

pytestmark = pytest.mark.slow

CONFIG = CacheConfig(n_ctx=128, n_ubatch=32, n_seq_max=2, block_size=16)
TEXT = [int(x) for x in np.random.default_rng(7).integers(0, 64, 100)]
POLICY = H2O(budget=20, interval=8)
WINDOW = [MaskSpec(), MaskSpec(kind="window", size=8)]


def test_it_keeps_what_one_eviction_at_the_end_keeps():
    """The reference has slots for the whole prompt, and goes on in them."""
    policy, model = SnapKV(budget=20, interval=8, window=5, head_share=0.5), ToyLm(masks=WINDOW)
    whole = Runtime(model, CONFIG, policy=dataclasses.replace(policy, interval=60))
    wanted = whole.append(TEXT[:80])[0]
    runtime = Runtime(model, CONFIG, policy=policy)
    runtime.append(TEXT[:9], 1)
    found = compress_prompt(runtime, TEXT[:80])
    np.testing.assert_allclose(found.logits, wanted, atol=2e-4)
    for layer, heads in whole.kept_positions().items():
        for mine, theirs in zip(runtime.kept_positions()[layer], heads, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert sum(map(len, heads)) == 20 * len(heads)
    for token in TEXT[80:87]:
        np.testing.assert_allclose(runtime.append([token]), whole.append([token]), atol=2e-4)
    # An eviction each 8 tokens keeps others: the control.
    other = Runtime(model, CONFIG, policy=policy)
    other.append(TEXT[:80])
    assert abs(np.asarray(other.append([1])) - np.asarray(runtime.append([1]))).max() > 1e-2
    assert runtime.seq_pos_max(1) == 8


def test_what_it_takes_at_its_peak_and_what_stays():
    runtime = Runtime(ToyLm(), CONFIG, policy=POLICY)
    found = compress_prompt(runtime, TEXT)
    assert found.compile_s > 0
    # 100 slots of one sequence, and 28 of each of two; 4 bytes of either say how many are taken.
    one = (found.transient_bytes - 8) / 100
    assert runtime.stats().cache_bytes == 2 * (28 * one + 8)


def test_a_progress_that_raises_leaves_nothing_of_the_prompt():
    runtime, done = Runtime(ToyLm(), CONFIG, policy=POLICY), []

    def stop(*n):
        done.append(n)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_prompt(runtime, TEXT, 1, progress=stop)
    assert done == [(32, 100), (64, 100)] and runtime.seq_pos_max(1) < 0
    compress_prompt(runtime, TEXT, 1)
    assert runtime.seq_pos_max(1) == 99


def test_a_prompt_that_fits_is_only_read():
    runtime = Runtime(ToyLm(), CONFIG, policy=POLICY)
    found = compress_prompt(runtime, TEXT[:27])
    assert found.transient_bytes == 0 == found.compile_s
    assert len(runtime.kept_positions()[0][0]) == 27


def test_what_cannot_be_compressed_is_refused_in_one_line():
    pyramid = H2O(budget=20, interval=8, n_recent=2, pyramid=1.5)
    full = Runtime(ToyLm(), CONFIG, policy=POLICY)
    full.append(TEXT[:5])
    for runtime, says in (
        (Runtime(ToyLm(), CONFIG), "no layer keeps tokens by score"),
        (Runtime(ToyLm(n_layers=4), CONFIG, policy=pyramid), "use append"),
        (full, "sequence 0 has tokens; clear it first"),
    ):
        with pytest.raises(UsageError, match=says) as found:
            compress_prompt(runtime, TEXT)
        assert "\n" not in str(found.value)

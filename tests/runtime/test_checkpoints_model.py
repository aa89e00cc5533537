"""Gemma 3, where five of six layers have a window: an insertion reuses what lies before it."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime, session
from kvrt.reuse.plan import operations, plan_reuse
from kvrt_models.load import load

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_layer_a_program")]
OPTIMISED = False  # products of float32 cost the same, and compiling less

# The windows of 512 tokens have left the insertion's place behind.
N_UBATCH, AT, N_TEXT = 64, 70, 640
SIZES = {"n_ctx": 768, "n_ubatch": N_UBATCH, "block_size": 64}


def reused(at, wanted):
    """Cuts a runtime back and reads what is left of a prompt: tokens reused, and its logits."""
    plan = plan_reuse(at.token_history(), wanted, at=at.resume_positions())
    cut, last = operations(plan)
    at.seq_rm(0, cut.p0)
    return plan.n_reused, np.asarray(at.append(wanted[last.start :]))


def test_an_insertion_in_a_long_text_reuses_what_lies_before_it(tmp_path):
    decoder = load("gemma3-270m").decoder
    old = np.random.default_rng(3).integers(100, 200_000, N_TEXT - 1).tolist()
    new = [*old[:AT], 107, *old[AT:]]
    config = CacheConfig(**SIZES, n_checkpoints=32)
    fresh = np.asarray(Runtime(decoder, config).append(new))

    at = Runtime(decoder, config)
    at.append(old)
    path = tmp_path / "gemma.kv"
    # Without its checkpoints nothing of it could be reused.
    assert at.resume_positions().earliest > AT
    session.save(path, at.snapshot())
    del at

    restarted = Runtime(decoder, config)
    restarted.restore(session.read(path))
    n_reused, logits = reused(restarted, new)
    assert n_reused == AT // N_UBATCH * N_UBATCH == 64
    assert restarted.stats().n_rewinds == 1 and restarted.stats().n_recomputed == 0
    np.testing.assert_array_equal(logits, fresh)

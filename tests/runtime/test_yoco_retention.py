"""YOCO with gated retention in its first half: parts, early exit, rollback, files and requests."""

import functools

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime, session
from kvrt.errors import UnsupportedModel
from kvrt_models.families.shared.registry import spec_from_config
from tests.retentiontoy import Dense, decoder
from tests.serving import engines
from tests.yocotoy import CONFIG, HALF, N_HEADS, D

TEXT = [(7 * i + i // 5) % 32 for i in range(60)]
SIZES = dict(n_ctx=96, block_size=8, n_ubatch=16, n_seq_max=2, n_rs_seq=4)


def make():
    return Runtime(decoder(), CacheConfig(**SIZES))


@functools.cache
def wanted():
    return Dense().logits(TEXT)


def close(found, expected, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(found), expected, atol=tolerance, rtol=0)


@pytest.mark.slow
def test_parts_and_single_steps_are_the_dense_model_and_so_is_what_follows_a_rollback():
    at = make()
    assert at.cache.states is not None
    assert {x.shape[1:] for t in at.cache.states.tables for x in t} == {(1,), (N_HEADS, D, D)}
    assert [g.layers for g in decoder().groups] == [(HALF,)]
    close(at.append(TEXT[:41], out_ids=range(41)), wanted()[:41])
    for i in range(41, 46):
        close(at.append(TEXT[i : i + 1]), wanted()[i : i + 1])
    at.seq_rm(0, 43)
    close(at.append(TEXT[43:]), wanted()[-1:])


@pytest.mark.slow
def test_a_session_and_a_copy_go_on_as_the_text(tmp_path):
    at = make()
    at.append(TEXT[:37])
    session.save(tmp_path / "a.kvrt", at.snapshot())
    other = make()
    other.restore(session.read(tmp_path / "a.kvrt"))
    other.seq_cp(0, 1)
    other.append([5, 6, 7])
    close(other.append(TEXT[37:], 1), wanted()[-1:])


@pytest.mark.slow
def test_requests_and_hits_are_those_of_the_dense_model():
    """A hit ends with the state of a block; the matrix has checkpoints of states as well."""
    engine = engines.make("retention")
    first = engines.served(engine, [engines.ask("a", TEXT[:24], 9)])["a", 0]
    text, n_cached = [*TEXT[:24], *first], []

    def check(out):
        close(engine.logits(out.id), Dense().logits([*text[:24], 3, 3, *later])[-1], 1e-4)
        later.extend(out.tokens)
        n_cached.append(out.n_cached)

    for i, token in enumerate(first):
        assert token == int(Dense().logits(text[: 24 + i])[-1].argmax())
    later = []
    engines.served(engine, [engines.ask("b", [*text[:24], 3, 3], 4)], check)
    assert max(n_cached) >= 16


def test_another_first_half_is_refused():
    with pytest.raises(UnsupportedModel, match="only sliding_window and gated_retention"):
        spec_from_config(CONFIG | {"self_decoder": "mamba"})

"""What a sequence and a session say of tokens that were computed by sparse reads."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime, session
from kvrt.options.select import DoubleSparsity, Quest
from kvrt.serving.sessions.prefix import SessionPrefix
from kvrt.session.change.sequences import with_sequence
from tests.toys import ToyLm

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(0).integers(0, 64, 400).tolist()
QUEST = Quest(n_cells=64, n_dense=1, n_sink=1, n_recent=8)
BY_CELL = DoubleSparsity(
    n_cells=48, n_dense=1, by_cell=True, n_recent=8, channels=((((0, 3),) * 2),) * 2
)
MODEL = ToyLm(n_layers=2)


def runtime_of(select):
    config = CacheConfig(n_ctx=200, block_size=16, n_ubatch=64, n_seq_max=2, select=select)
    return Runtime(MODEL, config)


@pytest.mark.parametrize("n_other", [0, 5], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("select", [QUEST, BY_CELL], ids=["units", "cells"])
def test_the_first_token_that_is_not_exact_is_the_first_that_differs(select, n_other):
    """Behind another sequence units are shared, so that a sequence lies in more of them."""
    both = [runtime_of(x) for x in (None, select)]
    for runtime in both:
        if n_other:
            runtime.prefill(TOKENS[:n_other])
        runtime.prefill(TOKENS[:40], 1)
    found = []
    for i, token in enumerate(TOKENS[40:80]):
        dense, sparse = (np.asarray(x.append([token], 1)) for x in both)
        found += [40 + i] * (not np.array_equal(dense, sparse))
    assert both[1].n_exact(1) == found[0] and both[0].n_exact(1) is None


def test_runs_on_the_device_say_what_single_steps_say():
    one, many = runtime_of(QUEST), runtime_of(QUEST)
    for runtime, stride in ((one, 1), (many, 16)):
        runtime.prefill(TOKENS[:50])
        list(runtime.generate(31, stride=stride))
        assert runtime.n_exact() == 65
    many.seq_rm(0, 65)
    assert many.n_exact() is None and many.snapshot().select is None
    many.prefill(TOKENS[100:150])
    assert many.n_exact() is None, "a prompt reads all"


def test_a_session_says_it_and_goes_on_saying_it(tmp_path):
    runtime = runtime_of(QUEST)
    runtime.prefill(TOKENS[:60])
    session.save(tmp_path / "dense.kv", runtime.snapshot())
    assert session.read_manifest(tmp_path / "dense.kv").select is None
    list(runtime.generate(12))
    session.save(tmp_path / "sparse.kv", runtime.snapshot())
    said = session.read_manifest(tmp_path / "sparse.kv")
    assert said.select == QUEST.said and said.exact == {0: 65}
    dense = runtime_of(None)
    held = session.read(session.open_session(tmp_path / "sparse.kv"))
    dense.restore(held)
    dense.append(TOKENS[:3])
    assert dense.snapshot().select == QUEST.said and dense.n_exact() == 65
    assert len(SessionPrefix(held, 0).tokens) == 65, "an engine takes what is exact"
    dense.clear()
    dense.prefill(TOKENS[:60])
    assert dense.snapshot().select is None
    joined = with_sequence(held, 1, dense.snapshot())
    assert joined.select == QUEST.said


def test_channels_are_told_by_their_number():
    assert BY_CELL.said["channels"] == 2

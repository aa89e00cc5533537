"""Keys by channel in an engine: a request gets what it gets alone, whoever comes, hits or goes.

The oracle is the matrix's: it computes each request by itself, in the chunks of the engine's steps.
"""

import dataclasses

import numpy as np
import pytest

from kvrt.errors import BadConfig
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.program import estimate
from kvrt.serving.engine import Engine
from kvrt.store.per_channel import PerChannel
from tests.matrix.axes import Cell
from tests.matrix.build import config_of, model_of
from tests.matrix.engine_history import EngineHistory
from tests.matrix.plainmodel import drawn

CELL = Cell(where="engine_paged", dtype="kivi4")
N_STEP = 8


class Requests(EngineHistory):
    """Requests of an engine, some of which are preempted."""

    def __init__(self, n_ctx, n_seq=3, block=32, **options):
        sizes = dict(n_ctx=n_ctx, n_seq_max=n_seq, block_size=block, n_ubatch=N_STEP)
        config = dataclasses.replace(config_of(CELL), **sizes)
        options = EngineConfig(rules=Rules(n_batch=N_STEP), **options)
        super().__init__(CELL, Engine(model_of("full"), config, options))

    def compare(self, name):
        """As of `EngineHistory`; after a preemption begins anew with what is still found."""
        tokens, found = self.tokens[name], iter(self.logits[name])
        n_prompt = n_known = len(tokens) - len(self.logits[name])
        seq, n_done = self.begun(tokens, self.chunks[name][0][0], n_prompt)
        for start, n in self.chunks[name]:
            if start != n_done:
                seq, n_done = self.begun(tokens, start, n_prompt)
            n_done += n
            wanted = self.stepped(seq, tokens[start:n_done])
            if n_done == n_known:
                self.judge(f"{name}, position {n_done - 1}", next(found), wanted)
                n_known += 1
        assert n_known == n_prompt + len(self.logits[name]) and next(found, None) is None


@pytest.mark.slow
def test_others_come_and_go_within_a_run():
    """A request waits within its run while more texts than places end within theirs."""
    at = Requests(256, n_seq=2)
    at.ask("long", drawn(0, 40), 40)
    for i in range(6):
        at.ask(f"{i}", drawn(i + 1, 37), 3, cache=i % 2 == 0)
        for _ in range(5):
            at.step()
    at.finish()
    for name in ("long", "0", "5"):
        at.compare(name)


@pytest.mark.slow
def test_what_is_preempted_and_admitted_again_goes_on_as_it_was():
    at = Requests(96, n_seq=2)
    at.ask("a", drawn(0, 40), 50)
    at.ask("b", drawn(1, 30), 40)
    at.finish()
    assert at.made.stats().sequences["preempted"] > 0
    at.compare("a")
    at.compare("b")


@pytest.mark.slow
def test_a_hit_within_a_block_ends_between_two_runs():
    """In a copy of a block which another request is still writing, beyond the hit."""
    at = Requests(384, block=96, hash_block_size=32)
    at.ask("a", drawn(0, 40), 50)
    while len(at.tokens["a"]) < 84:
        at.step()
    at.ask("b", [*drawn(0, 40), 3], 30)
    at.finish()
    assert at.n_cached["b"] == 32
    at.compare("a")
    at.compare("b")


def test_cells_that_share_a_scale_are_one_request_s():
    with pytest.raises(BadConfig, match="hash_block_size 16 would cut them; make it a multiple"):
        Requests(96, hash_block_size=16)


def test_what_is_said_is_what_is_allocated():
    """Tails of a run a sequence, and of two groups that share a pool."""
    model = model_of("full+window")
    config = dataclasses.replace(config_of(CELL), n_ctx=256, n_seq_max=5)
    said = estimate.of_blocks(model.groups, None, config)
    engine = Engine(model, config)
    assert said.cache_bytes == engine.device.n_bytes
    (store,) = engine.device.cache.stores
    keys = store.k[0]
    assert isinstance(keys, PerChannel) and len(keys.group) == 5 * 2 + 1
    np.testing.assert_equal(said.tail_bytes % (11 * 8), 0)

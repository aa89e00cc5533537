"""An engine's options: what they refuse, and the keyword arguments that they took the place of."""

import pytest

from kvrt import CacheConfig, EngineConfig, Rules
from kvrt.errors import BadConfig
from tests.serving.engines import ask, engine, make

CONFIG = CacheConfig(n_ctx=64, n_seq_max=2, block_size=8, n_ubatch=8)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "cell", "hash_block_size": 4}, "a hit ends at any token"),
    ],
)
def test_options_that_fit_no_cache_are_refused_at_once(options, told):
    with pytest.raises(BadConfig, match=told):
        EngineConfig(**options)


def test_options_that_do_not_fit_this_cache_are_refused():
    with pytest.raises(BadConfig, match="n_batch is 9, above n_ubatch 8"):
        EngineConfig(rules=Rules(n_batch=9)).fitted(CONFIG)
    assert EngineConfig().fitted(CONFIG).rules == Rules(n_batch=8)


def test_generate_takes_a_request_and_streams_it():
    at = engine("full", "paged")
    at.add_request(ask("a", [1, 2, 3], 6))
    wanted = [t for x in at.stream("a") for t in x.tokens]
    found = [t for x in at.generate(ask("a", [1, 2, 3], 6)) for t in x.tokens]
    assert found == wanted and len(found) == 6


@pytest.mark.slow
def test_an_ended_sample_keeps_nothing_but_its_tokens():
    at = make()
    for request in (ask("a", [1, 2, 3], 3), ask("b", [4, 5, 6], 9, n=2)):
        at.add_request(request)
    at.step()
    states = list(at.running)
    at.cancel("b")
    while at.has_work:
        at.step()
    assert {s.finish_reason for s in states} == {"length", "cancelled"}
    for state in states:
        held = (state.seq_id, state.queue_key, state.followers, state.awaits)
        assert {*held, state.chain, state.hit, state.n_shared, state.sampler} == {None}

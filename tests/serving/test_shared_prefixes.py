"""An engine that reads what its requests share once gives what it gives without."""

import numpy as np
import pytest
from engines import B, ask, make, run, served

from kvrt import CacheConfig, Engine, Sampling
from kvrt.attention import registry
from kvrt.errors import BadConfig
from kvrt.options.engine import EngineConfig
from tests.toys import ToyLm

OPTIMISED = False  # toys: what is compiled runs a few times
SYSTEM = np.random.default_rng(0).integers(0, 32, 9 * B).tolist()


def sharing(kind, mode):
    """An engine that reads all once that is shared: toys fit into one pass, and gain nothing."""
    engine = make(kind, mode, shared_reads=True)
    engine._steps._reads.choose = lambda runs, n_blocks, cost: runs[: cost.most]
    return engine


def requests():
    """Three of one system prompt, two of which go on alike for two blocks."""
    rng = np.random.default_rng(1)
    more, *own = (rng.integers(0, 32, n).tolist() for n in (2 * B, 3, 5, 7))
    texts = [[*SYSTEM, *more, *own[0]], [*SYSTEM, *more, *own[1]], [*SYSTEM, *own[2]]]
    return [ask(i, x, n_predict=9 - i) for i, x in enumerate(texts)]


def history(engine):
    """What the requests get after one that fills the prefix cache, then one that shares nothing."""
    run(engine, [ask("first", SYSTEM, n_predict=1)])
    found = run(engine, requests())
    n_compiles, reads = engine.programs.n_compiles, engine.stats().reads
    run(engine, [ask("stranger", [*range(3)], n_predict=4)])
    assert engine.programs.n_compiles == n_compiles, "sharing is no shape"
    assert engine.stats().reads == reads
    return found, reads


@pytest.mark.slow
def test_outputs_are_those_without():
    (tokens, logits), none = history(make())
    (found, others), reads = history(sharing("full", "paged"))
    assert found == tokens and not none
    for key, x in logits.items():
        np.testing.assert_allclose(others[key], x, atol=5e-5)
    # Nine blocks, in six steps of all three and one of two.
    assert reads["read_once"] >= 7 * 9 * B
    assert reads["not_read_again"] >= (6 * 2 + 1) * 9 * B


@pytest.mark.slow
def test_samples_of_one_request_share_its_prompt():
    asked = ask("a", [*SYSTEM, 1, 2], n=3, sampling=Sampling(temp=1.0, seed=3), n_predict=5)
    tokens = served(make("full", "paged"), [asked])
    engine = sharing("full", "paged")
    assert served(engine, [asked]) == tokens
    reads = engine.stats().reads
    assert reads["not_read_again"] == 2 * reads["read_once"] > 0


def searched(engine, asked):
    """Texts, their scores and ends, of searches that are served together."""
    for request in asked:
        engine.add_request(request)
    found = {}
    while engine.has_work:
        for out in engine.step():
            assert out.error is None
            found[out.id, out.sample] = out.tokens, out.finish_reason, out.score
    return found


@pytest.mark.slow
def test_beams_share_their_prompt_and_what_they_go_on_from():
    """Two searches of one system prompt: texts and scores are those without."""
    told = dict(n_predict=9, num_beams=2, n=2, stop_ids=(3, 9, 17))
    asked = [ask(i, [*SYSTEM, *tail], **told) for i, tail in enumerate(([1, 2], [1, 4, 5]))]
    plain, engine = make(), sharing("full", "paged")
    wanted, found = searched(plain, asked), searched(engine, asked)
    assert len(found) == 4 and engine.stats().sequences["forked"] >= 2
    for key, (tokens, reason, score) in wanted.items():
        assert found[key][:2] == (tokens, reason)
        assert found[key][2] == pytest.approx(score, abs=1e-4)
    reads = engine.stats().reads
    assert engine.programs.n_compiles == plain.programs.n_compiles
    # Both beams of a search read its prompt; those of the two share the system prompt.
    assert reads["not_read_again"] > 1.5 * reads["read_once"] > 10 * len(SYSTEM)


def test_an_implementation_that_reads_no_runs_is_refused():
    registry.register("reads_lists_alone", lambda: registry.implementation("chunked"))
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=8, attention="reads_lists_alone")
    with pytest.raises(BadConfig, match="registered without reads_shared; use"):
        Engine(ToyLm(), config, EngineConfig(shared_reads=True))

"""What an engine compiles, whatever comes: one program for decoding, one a bucket of prompts."""

import numpy as np
import pytest

from kvrt.program import batch as plans
from tests.serving.engines import N_BATCH, ask, make, run

pytestmark = pytest.mark.slow


def test_a_thousand_steps_compile_no_more_than_the_first():
    engine = make()
    rng = np.random.default_rng(0)
    n_steps = n_asked = 0
    while n_steps < 1000:
        if rng.random() < 0.25:
            n_asked += 1
            tokens = rng.integers(0, 32, rng.integers(1, 60))
            engine.add_request(ask(n_asked, tokens, int(rng.integers(1, 30))))
        if n_asked and rng.random() < 0.02 and engine.running:
            engine.cancel(engine.running[0].request.id)
        engine.step()
        n_steps += 1
    run(engine, [])
    names = [key.name for key in engine.programs.compiled()]
    # The first step of a size compiles it, and nothing else ever does.
    assert set(names) == {"forward"} and len(names) <= 1 + len(plans.buckets(N_BATCH))


def test_samples_of_one_prompt_part_where_it_ends():
    engine = make()
    engine.add_request(ask("a", [1, 2, 3, 4, 5], 6, n=3))
    outputs = [x for _ in range(12) for x in engine.step()]
    first = {x.sample: x.n_cached for x in reversed(outputs)}
    assert first == {0: 0, 1: 5, 2: 5}
    texts = [[t for x in outputs if x.sample == i for t in x.tokens] for i in range(3)]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 6
    assert engine.stats().sequences["forked"] == 2

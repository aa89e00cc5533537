"""Many requests at once: each gets what it gets alone, in cells and in blocks."""

import numpy as np
import pytest

from kvrt import Sampling
from tests.engine.engines import KINDS, alone, ask, drawn, engine, run

SOME = [k if k == "full" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]


@pytest.mark.parametrize("mode", [pytest.param("cell", marks=pytest.mark.slow), "paged"])
@pytest.mark.parametrize("kind", SOME)
def test_every_request_gets_what_it_gets_alone(kind, mode):
    rng = np.random.default_rng(0)
    samplings = [Sampling(), Sampling(temp=0.8, seed=3), Sampling(temp=1, top_k=5, seed=4)]
    asked = [
        ask(i, tokens, int(rng.integers(1, 12)), sampling=samplings[i % 3])
        for i, tokens in enumerate(drawn(rng, 9))
    ]
    found, _ = run(engine(kind, mode), asked)
    for request in asked:
        assert found[request.id, 0] == alone(kind, request), request.id

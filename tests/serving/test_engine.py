"""Many requests at once: each gets what it gets alone, in cells and in blocks."""

import numpy as np
import pytest

from kvrt import Sampling
from kvrt.errors import BadRequest
from tests.marks import slow
from tests.serving.engines import alone, ask, drawn, engine, make, run

EACH = [  # the matrix has every kind in both modes
    ("full", "paged"),
    slow("full", "cell"),
    slow("window", "cell"),
    slow("recurrent", "paged"),
]


@pytest.mark.parametrize(("kind", "mode"), EACH)
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


def test_a_cancelled_sample_leaves_the_others():
    at = engine("full", "paged")
    before = at.stats().finished
    request = ask("s", [1, 2, 3], 6, n=3, sampling=Sampling(temp=1, seed=5))
    at.add_request(request)
    at.step()
    at.step()
    at.cancel("s", 1)
    at.cancel("s", 2, reason="stop")
    with pytest.raises(BadRequest, match="'s', sample 1, is not being served"):
        at.cancel("s", 1)
    got = {}
    while at.has_work:
        for out in at.step():
            got.setdefault(out.sample, []).append(out.finish_reason)
    assert (got[0][-1], got[1], got[2]) == ("length", ["cancelled"], ["stop"])
    ended = {why: n - before[why] for why, n in at.stats().finished.items()}
    assert ended == {"stop": 1, "length": 1, "cancelled": 1, "error": 0}


@pytest.mark.slow
def test_a_copy_that_was_planned_for_a_cancelled_request_holds_no_block():
    """Of states that end within a block; what held them was another request's next step."""
    at = make("recurrent", hash_block_size=2)
    run(at, [ask("a", [1, 2, 3, 4, 5, 6])])
    at.add_request(ask("a", [1, 2, 3, 4, 5, 6]))
    at.step()
    at.cancel("a")
    while at.has_work:
        at.step()
    assert [pool.n_free for pool in at.space.pools] == [p.n_blocks - 1 for p in at.space.pools]

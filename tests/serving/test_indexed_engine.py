"""Engines on layers that an indexer chooses for: logits of sorted scores, and hits."""

import numpy as np
import pytest

from kvrt.serving.request import Request
from tests.indexedlm import PlainIndexed
from tests.serving import engines

pytestmark = pytest.mark.slow

PROMPTS = tuple(tuple((k * i + i // 3) % 32 for i in range(n)) for k, n in ((5, 22), (3, 13)))


class Judged:
    """A request's text, and what the oracle says of its next token."""

    def __init__(self, tokens):
        self.oracle, self.text, self.n_cached = PlainIndexed(engines.MODELS["indexed"]()), [], 0
        self.take(tokens)

    def take(self, tokens):
        self.text += tokens
        self.wanted = self.oracle.step(list(tokens))[-1]


def served(engine, prompts, n_predict):
    """Runs requests beside each other; the logits of each of their tokens are the oracle's."""
    judged = {}
    for name, tokens in prompts.items():
        engine.add_request(Request(id=name, tokens=tokens, n_predict=n_predict))
        judged[name] = Judged(tokens)
    while engine.has_work:
        for out in engine.step():
            for token in out.tokens:
                found = engine.logits(out.id)
                np.testing.assert_allclose(found, judged[out.id].wanted, atol=1e-4, rtol=0)
                judged[out.id].take([token])
            judged[out.id].n_cached = out.n_cached
    return judged


def test_requests_beside_each_other_and_hits_are_those_of_the_oracle():
    """In cells: the matrix has hits in blocks."""
    engine = engines.make("indexed", "cell")
    first = served(engine, dict(zip("ab", PROMPTS, strict=True)), 6)
    assert [len(x.text) for x in first.values()] == [28, 19]
    again = served(engine, {"c": (*first["a"].text[:-1], 9, 9), "d": PROMPTS[0][:17]}, 4)
    assert again["c"].n_cached >= 26 and again["d"].n_cached >= 16
    first, second = (x.cells for x in engine.space._arrays._cells.values())
    np.testing.assert_array_equal(first.pos, second.pos)
    np.testing.assert_array_equal(first.seqs, second.seqs)

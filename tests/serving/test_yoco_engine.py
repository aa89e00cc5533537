"""Engines on YOCO: one layer's keys and values for half the model, windows for the other half.

Layers that only read run for the outputs of a step alone: those of requests that decode, with block
tables of their own, beside those of prompts that end in it.
"""

import numpy as np
import pytest

from kvrt.serving.request import Request
from tests.serving import engines
from tests.yocotoy import HALF, Dense

PROMPT = tuple((5 * i + i // 3) % 32 for i in range(22))
OTHER = tuple((3 * i + i // 7 + 1) % 32 for i in range(17))


def checked(engine, asked, late=None):
    """Runs requests, `late` from the second step on; every token's logits are the dense model's."""
    texts, n_cached = {}, {}

    def add(requests):
        for name, tokens in requests.items():
            engine.add_request(Request(id=name, tokens=tokens, n_predict=4))
            texts[name] = list(tokens)

    add(asked)
    while engine.has_work:
        outputs = engine.step()
        for out in outputs:
            for token in out.tokens:
                assert token == int(np.argmax(Dense().logits(texts[out.id])[-1]))
                texts[out.id].append(token)
                n_cached[out.id] = out.n_cached
            if out.tokens:
                wanted = Dense().logits(texts[out.id][:-1])[-1]
                np.testing.assert_allclose(engine.logits(out.id), wanted, atol=1e-4, rtol=0)
        if late:
            add(late)
            late = None
    return texts, n_cached


@pytest.mark.slow
def test_requests_and_hits_are_those_of_a_dense_model():
    """One decodes while another's prompt is read; a third finds blocks of both kinds."""
    engine = engines.make("yoco")
    texts, n_cached = checked(engine, {"a": PROMPT}, late={"b": OTHER})
    assert not any(n_cached.values())
    _, n_cached = checked(engine, {"c": (*texts["a"][:-1], 9, 9, 9)})
    assert n_cached["c"] >= 20


def test_blocks_are_of_half_the_layers_and_one():
    layout = engines.make("yoco", "paged").device.layout
    assert sorted(len(g.layers) for g in layout.groups) in ([1, 1, 1], [1, HALF])
    assert [g.kv_of for g in layout.groups if g.kv_of] == [((3, 2), (4, 2))]

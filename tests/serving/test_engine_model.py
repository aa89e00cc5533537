"""Engines on real models: windows that slide, beginnings that are shared."""

import numpy as np
import pytest

from kvrt import CacheConfig, Engine, EngineConfig, Request
from kvrt_models.load import load
from tests.marks import full

pytestmark = pytest.mark.model


def serve(engine, asked):
    """Tokens, what was found of each prompt, and the logits of every draw."""
    for request in asked:
        engine.add_request(request)
    tokens, cached, logits = {}, {}, {}
    while engine.has_work:
        for out in engine.step():
            tokens.setdefault(out.id, []).extend(out.tokens)
            cached[out.id] = out.n_cached
            logits.setdefault(out.id, []).append(np.asarray(engine.logits(out.id)))
    return tokens, cached, logits


@pytest.mark.parametrize(("n_tokens", "n_ubatch"), [full(900, 96), (577, 576)])
def test_gemma_in_blocks_is_gemma_in_cells_when_its_windows_slide(n_tokens, n_ubatch):
    """To the bit, in steps that its windows of 512 are no multiple of, or longer than these."""
    decoder = load("gemma3-270m").decoder
    tokens = tuple(np.random.default_rng(0).integers(1000, 9000, n_tokens).tolist())
    found = []
    for mode in ("paged", "cell"):
        config = CacheConfig(n_ctx=1024, n_seq_max=2, block_size=16, n_ubatch=n_ubatch)
        engine = Engine(decoder, config, EngineConfig(mode=mode))
        found.append(serve(engine, [Request(id="a", tokens=tokens, n_predict=8)]))
        if mode == "paged":
            again = serve(engine, [Request(id="b", tokens=tokens, n_predict=8)])
            assert again[1]["b"] == n_tokens // 16 * 16 and again[0]["b"] == found[0][0]["a"]
        else:  # cells of all positions are kept
            assert {len(cells.pos) for cells in engine.device.cache.cells} == {1024}
    (a, _, of_blocks), (b, _, of_cells) = found
    assert a == b
    np.testing.assert_array_equal(np.stack(of_blocks["a"]), np.stack(of_cells["a"]))

"""Many requests at once: each gets what it gets alone, in cells and in blocks."""

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime, Sampling
from kvrt.engine.engine import Engine
from kvrt.engine.plan import Rules
from kvrt.engine.requests import Request
from tests.toys import HybridLm, ToyLm

N_VOCAB = 64
MODELS = {
    "full": lambda: ToyLm(),
    "window": lambda: ToyLm(n_layers=3, masks=[MaskSpec(), *[MaskSpec(kind="window", size=9)] * 2]),
    "chunked": lambda: ToyLm(masks=[MaskSpec(kind="chunked", size=8), MaskSpec()]),
    "recurrent": lambda: HybridLm(),
    "states": lambda: HybridLm(attention=False),
}


def make(kind="full", mode="paged", n_ctx=256, n_rows=4, block_size=4, n_batch=32, **options):
    config = CacheConfig(
        n_ctx=n_ctx, n_seq_max=n_rows, block_size=block_size, n_ubatch=n_batch, **options
    )
    return Engine(MODELS[kind](), config, mode=mode, rules=Rules(n_batch=n_batch))


def drawn(rng, n, n_vocab=32, low=1, high=40):
    return [tuple(rng.integers(0, n_vocab, rng.integers(low, high)).tolist()) for _ in range(n)]


def run(engine, asked):
    for request in asked:
        engine.add_request(request)
    found = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault((output.id, output.sample), []).extend(output.tokens)
    return found


def alone(kind, request, **options):
    config = CacheConfig(n_ctx=256, block_size=64, n_ubatch=64, **options)
    runtime = Runtime(MODELS[kind](), config)
    runtime.append(request.tokens)
    recent = request.tokens[-request.sampling.repeat_last_n :]
    found = runtime.generate(
        request.n_predict, sampling=request.sampling, stop_ids=request.stop_ids, recent=recent
    )
    return [t.id for t in found]


@pytest.mark.parametrize("mode", ["cell", "paged"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_every_request_gets_what_it_gets_alone(kind, mode):
    rng = np.random.default_rng(0)
    asked = [
        Request(id=str(i), tokens=tokens, n_predict=int(rng.integers(1, 12)))
        for i, tokens in enumerate(drawn(rng, 9))
    ]
    found = run(make(kind, mode), asked)
    for request in asked:
        assert found[request.id, 0] == alone(kind, request), request.id

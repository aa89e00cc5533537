"""Engines on tiny models, and what they give, for tests."""

import dataclasses
import functools

import numpy as np

from kvrt import CacheConfig, MaskSpec, RopeSpec, Runtime
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.serving.engine import Engine
from kvrt.serving.request import Request
from tests import retentiontoy, yocotoy
from tests.indexedlm import IndexedLm
from tests.latentlm import LatentLm
from tests.sharedlm import SharedLm
from tests.toys import DeltaLm, HybridLm, KindedLm, ToyLm

# Steps of one token and of up to 8: two programs an engine.
B, N_ROWS, N_BATCH = 4, 4, 8
WINDOWS = [MaskSpec(), *[MaskSpec(kind="window", size=9)] * 2]
MODELS = {
    "full": ToyLm,
    "window": functools.partial(ToyLm, n_layers=3, masks=WINDOWS),
    "chunked": functools.partial(ToyLm, masks=[MaskSpec(kind="chunked", size=8), MaskSpec()]),
    "recurrent": HybridLm,
    "states": functools.partial(HybridLm, attention=False),
}


def of_ropes(*bases, **options):
    """A model whose layers, which share a pool, rotate by these bases; as Gemma 3's do."""
    model = ToyLm(n_layers=len(bases), **options)
    model.groups = tuple(
        dataclasses.replace(g, rope=RopeSpec(n_rot=16, base=base))
        for g, base in zip(model.groups, bases, strict=True)
    )
    return model


# Of few tests each.
MODELS |= {
    "sinks": functools.partial(
        ToyLm, masks=[MaskSpec(kind="window", size=9, n_sink=3), MaskSpec()]
    ),
    "rolling": functools.partial(ToyLm, masks=[MaskSpec(kind="window", size=12)] * 2),
    "ropes": functools.partial(of_ropes, 100.0, 17.0, 900.0, masks=WINDOWS),
    "delta": DeltaLm,
    "shared": functools.partial(SharedLm, (0, 1, 0, 1), masks=[WINDOWS[1], WINDOWS[0]] * 2),
    "yoco": yocotoy.decoder,
    "retention": retentiontoy.decoder,
    "latent": functools.partial(LatentLm, masks=WINDOWS[:2]),
    "indexed": IndexedLm,
    "by layer": functools.partial(KindedLm, n_layers=4, masks=WINDOWS[:2] * 2),
    "full ropes": functools.partial(of_ropes, 100.0, 17.0, masks=[MaskSpec()] * 2),
}

_OF_ENGINE = {f.name for f in dataclasses.fields(EngineConfig)}


def make(kind="full", mode="paged", **options):
    """An engine; options are fields of its EngineConfig and of its CacheConfig."""
    sizes = dict(n_ctx=256, n_seq_max=N_ROWS, block_size=B, n_ubatch=N_BATCH)
    told = {name: options.pop(name) for name in _OF_ENGINE & options.keys()}
    config = CacheConfig(**(sizes | options))
    told["rules"] = told.get("rules") or Rules(n_batch=config.n_ubatch)
    return Engine(MODELS[kind](), config, EngineConfig(mode=mode, **told))


@functools.cache
def engine(kind, mode):
    """One that tests share: with nothing left to do it is as good as new, but for blocks' prefixes.

    Where cells are kept later ones lie elsewhere, and a sum over their blocks rounds otherwise.
    """
    return make(kind, mode, prefix_cache=mode == "paged")


@functools.cache
def runtime(kind, n_ctx=128, policy=None, extend=None):
    sizes = dict(n_ctx=n_ctx, block_size=min(n_ctx, 64), n_ubatch=N_BATCH)
    config = CacheConfig(**sizes, self_extend=extend)
    return Runtime(MODELS[kind](), config, policy=policy)


def ask(i, tokens, n_predict=6, **options):
    return Request(id=str(i), tokens=tuple(map(int, tokens)), n_predict=n_predict, **options)


def drawn(rng, n, low=1, high=40):
    return [rng.integers(0, 32, rng.integers(low, high)) for _ in range(n)]


def served(engine, asked, each=lambda out: None, after_step=lambda: None):
    """Tokens of all samples; `each` gets every output, when its step has just run."""
    for request in asked:
        engine.add_request(request)
    tokens = {}
    while engine.has_work:
        for out in engine.step():
            assert out.error is None
            tokens.setdefault((out.id, out.sample), []).extend(out.tokens)
            each(out)
        after_step()
    return tokens


def served_texts(engine, texts, n_predict):
    """What requests of these texts, all added at once, are answered; in their order."""
    asked = [Request(id=str(i), tokens=tuple(x), n_predict=n_predict) for i, x in enumerate(texts)]
    tokens = served(engine, asked)
    return [tokens[x.id, 0] for x in asked]


def run(engine, asked):
    """Tokens and logits of all samples."""
    logits = {}

    def take(out):
        if out.tokens:
            row = np.asarray(engine.logits(out.id, out.sample))
            logits.setdefault((out.id, out.sample), []).append(row)

    tokens = served(engine, asked, take)
    assert len(engine.space._free) == N_ROWS
    return tokens, {key: np.stack(x) for key, x in logits.items()}


def one(engine, request):
    tokens, logits = run(engine, [request])
    key = (request.id, 0)
    return tokens[key], logits[key]


def alone(kind, request, n_ctx=128, extend=None):
    """What a Runtime gives; with the request's policy in a context of n_ctx."""
    policy = None if isinstance(request.policy, str) else request.policy
    at = runtime(kind, n_ctx, policy, extend)
    at.clear()
    at.append(request.tokens)
    sampling = request.sampling
    recent = request.tokens[-sampling.repeat_last_n :]
    found = at.generate(request.n_predict, sampling=sampling, recent=recent)
    return [t.id for t in found]

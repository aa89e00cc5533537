"""Rounds of drafts, layers that draft, blends and taps give the same by layer as whole."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from kvrt import (
    CacheConfig,
    Engine,
    LayerSkip,
    MaskSpec,
    Quest,
    Request,
    Sampling,
    SelfExtend,
    Speculation,
)
from kvrt.policies.scored import H2O
from kvrt.program.layers.by_layer import StepByLayer
from kvrt.reuse.blend import BlendSpec
from kvrt.runtime.heavy_channels import heavy_channels
from kvrt.serving.config import EngineConfig
from kvrt.store.codec import decode
from kvrt_models.load import load
from tests import retentiontoy, yocotoy
from tests.marks import full, slow
from tests.matrix.plainmodel import PlainModel
from tests.program.test_by_layer import WINDOW, both
from tests.serving.test_engine_drafts import Script
from tests.toys import KindedLm, ToyLm

HF = Path(__file__).parents[1] / "golden" / "hf"
TEXT = np.random.default_rng(1).integers(0, 32, 60).tolist()
N_DRAFT, N = 3, 24
FULL, CHUNKED = MaskSpec(), MaskSpec(kind="chunked", size=8)
EXACT = {"type_k": "f32", "type_v": "f32"}
TOY = functools.partial(KindedLm, n_vocab=32, n_layers=4)
FAMILY = functools.lru_cache(maxsize=1)(lambda name: load(HF / name).decoder)


def parts(layers):
    return lambda: PlainModel(layers, has_front=True)


# By name the model, and options of its cache.
KINDS = {
    "full": (TOY, {}),
    "f16": (TOY, {"type_k": "f16", "type_v": "f16"}),
    "window": (functools.partial(TOY, masks=(WINDOW, FULL) * 2), {}),
    "chunked": (functools.partial(TOY, masks=(CHUNKED, FULL) * 2), {}),
    "rolling": (functools.partial(TOY, masks=(WINDOW,) * 4), {"n_ctx": 48}),
    "read": (TOY, {"rope": "read"}),
    "int8": (TOY, {"type_k": "int8", "type_v": "int8", "hadamard": True}),
    "paper": (TOY, {"rope": "read", "self_extend": SelfExtend(ga_n=2, ga_w=8, kind="paper")}),
    "h2o": (TOY, {"policy": H2O(budget=24)}),
    "shared": (parts("shared"), EXACT),
    "produced": (parts("produced"), EXACT),
    "latent": (parts("latent"), EXACT),
    "yoco": (yocotoy.decoder, EXACT),
    "retention": (retentiontoy.decoder, EXACT),
    "recurrent": (parts("full+recurrent"), EXACT),
    "delta": (parts("full+delta"), EXACT),
    "state space": (lambda: FAMILY("bamba"), EXACT),
}
QUICK = ("f16", "recurrent")


# Masks, frames of keys and types that the matrix has by layer, and mixtures of the others.
OF_SOAK = {"full", "chunked", "read", "int8", "paper", "shared", "state space"}


def few(names, quick):
    return [x if x in quick else full(x) if x in OF_SOAK else slow(x) for x in names]


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """Texts are drafted for however few drafts stay."""
    for of in ("runtime.stepper", "serving.drafting.engine_drafts"):
        monkeypatch.setattr(f"kvrt.{of}.after_round", lambda before, *_: before)


def pair(name, behind=1.0, **options):
    """A runtime of each way; by layer each layer has a program, or those of its kind.

    `behind` is a factor of the weights of the third and the fourth layer.
    """
    make, of_kind = KINDS[name]
    model = make()
    for i in (2, 3) if behind != 1.0 else ():
        model.qkv[i][...] *= behind
    whole, by_layer = both(model, **of_kind, **options)
    device = by_layer._cache.device
    device.by_layer = StepByLayer(device.programs, n_each=1)
    return whole, by_layer


def same_cache(whole, by_layer):
    """Equal in all cells, those of refused drafts too, but for what a KV dtype rounds."""
    exact = whole.config.type_k == "f32"
    for store, other in zip(whole.cache.stores, by_layer.cache.stores, strict=True):
        for a, b in zip(*((*x.k, *x.v) for x in (store, other)), strict=True):
            tolerance = {"rtol": 1e-4, "atol": 1e-4} if exact else {"rtol": 2e-3, "atol": 0.05}
            np.testing.assert_allclose(decode(a, -1), decode(b, -1), **tolerance)
    rest = [jax.tree.leaves((x.cache.states, x.cache.nan_scores)) for x in (whole, by_layer)]
    for a, b in zip(*rest, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    for a, b in zip(*(jax.tree.leaves(x.cache.cells) for x in (whole, by_layer)), strict=True):
        np.testing.assert_array_equal(a, b)


def generated(runtime, drafter, **asked):
    """Tokens and log-probabilities of a text with drafts."""
    runtime.clear()
    runtime.prefill(TEXT[:11])
    spec = Speculation(drafter=drafter, n_draft=N_DRAFT)
    tokens = list(runtime.generate(N, speculation=spec, n_best=2, **asked))
    return [t.id for t in tokens], np.array([[p for _, p in t.best] for t in tokens])


def refuse(runtime, drafter):
    """Ends a text behind a round of which a draft was refused, whose cells no later token takes."""
    runtime.clear()
    runtime.prefill(TEXT[:11])
    before = runtime.stats()
    for _ in runtime.generate(N, speculation=Speculation(drafter=drafter, n_draft=N_DRAFT)):
        now = runtime.stats()
        if now.n_drafted - now.n_accepted > before.n_drafted - before.n_accepted:
            return
    raise AssertionError("no draft was refused")


def same_text(whole, by_layer, drafter, **asked):
    """Text, log-probabilities, cache and counts are equal, and of the drafts some stayed."""
    (ids, best), (others, found) = (generated(x, drafter(), **asked) for x in (whole, by_layer))
    assert ids == others
    np.testing.assert_allclose(best, found, rtol=1e-4, atol=1e-4)
    same_cache(whole, by_layer)
    counts = [(x.n_rounds, x.n_drafted, x.n_accepted) for x in (whole.stats(), by_layer.stats())]
    assert counts[0] == counts[1] and 0 < counts[0][2] < counts[0][1]
    names = [{key.name for key in x.programs.compiled()} for x in (whole, by_layer)]
    assert names[0] & {"verify_round", "layer_skip"}
    assert not names[1] & {"verify_round", "layer_skip", "forward"}
    assert names[1] >= {"unwritten_layers", "accept_round", "write_layers"}
    assert by_layer.stats().programs.startswith("by_layer")
    for runtime in (whole, by_layer):
        refuse(runtime, drafter())
    same_cache(whole, by_layer)


@pytest.mark.parametrize("name", few(KINDS, QUICK))
def test_a_round_gives_the_same(name):
    whole, by_layer = pair(name)
    whole.prefill(TEXT[:11])
    text = TEXT[:11] + [t.id for t in whole.generate(N)]

    def script():
        made = Script(N_DRAFT, whole.programs.kind.model(whole.programs.params).n_vocab)
        made.texts = [text]
        return made

    same_text(whole, by_layer, script)
    sampling = Sampling(temp=0.9, seed=3, repeat_penalty=1.3, repeat_last_n=8)
    if name in QUICK[:1]:
        same_text(whole, by_layer, script, sampling=sampling, stop_ids=(31,))


@pytest.mark.parametrize("name", few(("full", "window", "rolling", "int8", "read"), ("window",)))
def test_layers_that_draft_give_the_same(name):
    """Of a model whose other layers change little."""
    whole, by_layer = pair(name, behind=0.3)
    same_text(whole, by_layer, lambda: LayerSkip(exit_layer=2))


def test_layers_that_draft_have_the_programs_of_single_steps():
    """Those before the exit; where it cuts a run of three, the parts have programs of their own."""
    runtime = both(KindedLm(n_vocab=32, n_layers=9))[1]
    assert [(x.first, x.last) for x in runtime._cache.device.by_layer.runs] == [
        (0, 3),
        (3, 6),
        (6, 9),
    ]
    n_layers = []
    for exit_layer in (None, 3, 4):
        runtime.clear()
        runtime.prefill(TEXT[:5])
        drafter = exit_layer and LayerSkip(exit_layer=exit_layer)
        spec = drafter and Speculation(drafter=drafter, n_draft=N_DRAFT)
        list(runtime.generate(5, speculation=spec))
        names = [key.name for key in runtime.programs.compiled()]
        n_layers.append((names.count("layers"), names.count("unwritten_layers")))
    # Layers [6, 9) are those of [0, 3), [3, 4) and [4, 6) are new.
    assert n_layers == [(2, 0), (2, 1), (3, 2)]


def served(engine):
    """Texts of requests of which one has no drafts."""
    texts = {}
    for i in range(4):
        tokens = tuple(TEXT[i : 9 + 3 * i])
        request = Request(id=str(i), tokens=tokens, n_predict=14, drafts=i != 1)
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            texts.setdefault(output.id, []).extend(output.tokens)
    return texts


def engines(name, mode, **options):
    """An engine of each way."""
    model, of_kind = KINDS[name]
    sizes = {"n_ctx": 128, "n_seq_max": 3, "block_size": 8, "n_ubatch": 16}
    for programs in ("whole", "by_layer"):
        config = CacheConfig(**{**sizes, **of_kind, "programs": programs})
        yield Engine(model(), config, EngineConfig(mode=mode, **options))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        slow("window", "cell"),
        *map(slow, ["window", "recurrent", "produced"], ["paged"] * 3),
        *map(full, ["full", "retention"], ["cell"] * 2),
        *map(full, ["f16", "yoco", "latent"], ["paged"] * 3),
    ],
)
def test_rounds_of_many_give_the_same(name, mode):
    (plain,) = list(engines(name, mode))[:1]
    whole_texts = served(plain)
    found = []
    for engine_of in (0, 1):
        script = Script(N_DRAFT, plain.device.n_vocab)
        script.texts = [TEXT[i : 9 + 3 * i] + whole_texts[str(i)] for i in range(4)]
        spec = Speculation(drafter=script, n_draft=N_DRAFT)
        engine = list(engines(name, mode, speculation=spec))[engine_of]
        found.append((served(engine), engine.stats().drafts))
        names = {key.name for key in engine.device.programs.compiled()}
        assert ("accept_round" in names, "verify_round" in names) == (
            engine_of == 1,
            engine_of == 0,
        )
        assert engine.stats().programs.startswith(("whole", "by_layer")[engine_of])
    assert found[0] == found[1] and 0 < found[0][1]["accepted"] < found[0][1]["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_layers_that_draft_for_many_give_the_same(mode):
    spec, found = Speculation(drafter=LayerSkip(exit_layer=2), n_draft=N_DRAFT), []
    for engine in engines("window", mode, speculation=spec):
        found.append((served(engine), engine.stats().drafts))
        names = {key.name for key in engine.device.programs.compiled()}
        assert ("layer_skip" in names) != ("draft_tokens" in names)
    assert found[0] == found[1] and 0 < found[0][1]["accepted"] < found[0][1]["drafted"]


BLENDS = {
    "full": 1,
    "int8": 2,
    "window": 0,
    "shared": 0,
    "produced": 0,
    "latent": 0,
    "read": 1,
    "quest": 1,
}


@pytest.mark.parametrize("name", few(BLENDS, ("full",)))
def test_a_blend_gives_the_same(name):
    spec, found = BlendSpec(ratio=0.4, check_layer=BLENDS[name]), []
    select = Quest(n_cells=48, n_sink=0, n_recent=8) if name == "quest" else None
    kind = "full" if select else name
    runtimes = pair(kind, n_ctx=128, swa_full=True, select=select)
    for runtime in runtimes:
        chunks = [runtime.chunk(TEXT[i : i + 13]) for i in (0, 20)]
        blended = runtime.blend(chunks, TEXT[40:45], spec)
        found.append((blended.computed.tolist(), np.asarray(blended.logits)))
        text = [t.id for t in runtime.generate(6)]
        found[-1] += (text,)
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
    same_cache(*runtimes)
    names = {key.name for key in runtimes[1].programs.compiled()}
    assert names >= {"put_stream", "vacate_slots", "layers"} and "run_part" not in names


def test_what_cells_are_attended_to_is_found_alike():
    gone = []
    for runtime in pair("full", n_ctx=64):
        runtime.prefill(TEXT[:40])
        gone.append(runtime.evict_cells(0, 20, window=6, n_sink=2).tolist())
        names = {key.name for key in runtime.programs.compiled()}
    assert gone[0] == gone[1] and len(gone[0]) == 20
    assert "tapped_layers" in names and "tapped_step" not in names


@pytest.mark.slow
def test_heavy_channels_are_found_alike():
    texts = [TEXT[:20], TEXT[20:40]]
    found = [heavy_channels(model(n_layers=3, n_vocab=32), texts, 4) for model in (ToyLm, KindedLm)]
    assert found[0] == found[1]


def test_an_error_between_programs_leaves_no_draft():
    """Layers that draft write cells before it is known which drafts stay."""
    by_layer = pair("full")[1]
    spec = Speculation(drafter=LayerSkip(exit_layer=2), n_draft=N_DRAFT)

    def text():
        by_layer.clear()
        by_layer.prefill(TEXT[:11])
        return [t.id for t in by_layer.generate(6, speculation=spec)]

    wanted, run, n_runs = text(), StepByLayer.run, []
    by_layer.clear()
    by_layer.prefill(TEXT[:11])

    def stopped(self, *args, **more):
        n_runs.append(1)
        if len(n_runs) == 3:
            raise KeyboardInterrupt
        return run(self, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepByLayer, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            list(by_layer.generate(6, speculation=spec))
    (cells,), (host,) = by_layer.cache.cells, by_layer.group_cells
    np.testing.assert_array_equal(np.asarray(cells.pos)[: len(host.pos)], host.pos)
    assert [t.id for t in by_layer.generate(6, speculation=spec)] == wanted

"""Rounds of drafts, layers that draft, blends and taps give the same by layer as whole."""

import contextlib
import functools
from collections import Counter
from itertools import islice

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
    Speculation,
)
from kvrt.options.engine import EngineConfig
from kvrt.policies.scored import H2O
from kvrt.program.layers.by_layer import StepByLayer
from kvrt.reuse.blend import BlendSpec
from kvrt.runtime.heavy_channels import heavy_channels
from kvrt.store.codec import decode
from tests import retentiontoy
from tests.marks import first_fast, slow
from tests.matrix.plainmodel import PlainModel
from tests.numpy_device.device import installed
from tests.program.test_by_layer import WINDOW, both
from tests.serving.test_engine_drafts import Script
from tests.toys import KindedLm, ToyLm

TEXT = np.random.default_rng(1).integers(0, 32, 60).tolist()
N_DRAFT, N = 3, 24
EXACT = {"type_k": "f32", "type_v": "f32"}
TOY = functools.partial(KindedLm, n_vocab=32)


def parts(layers):
    return lambda: PlainModel(layers, has_front=True)


# By name the model, and options of its cache.
KINDS = {
    "full": (functools.partial(TOY, n_layers=3), {}),
    "f16": (TOY, {"type_k": "f16", "type_v": "f16"}),
    "window": (functools.partial(TOY, masks=(WINDOW, MaskSpec())), {}),
    "h2o": (TOY, {"policy": H2O(budget=24)}),
    "produced": (parts("produced"), EXACT),
    "latent": (parts("latent"), EXACT),
    "retention": (retentiontoy.decoder, EXACT),
    "recurrent": (parts("full+recurrent"), EXACT),
    "delta": (parts("full+delta"), EXACT),
}


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """Texts are drafted for however few drafts stay."""
    for of in ("runtime.stepper", "serving.drafting.engine_drafts"):
        monkeypatch.setattr(f"kvrt.{of}.after_round", lambda before, *_: before)


def pair(name, behind=1.0, **options):
    """A runtime of each way; by layer each layer has a program, or those of its kind.

    `behind` is a factor of the weights behind the first layer.
    """
    make, of_kind = KINDS[name]
    model = make()
    if name == "f16":  # float64 is rounded to other keys, and NumPy's random numbers are others
        options["in_numpy"] = contextlib.nullcontext
    for i in range(1, model.n_layers) if behind != 1.0 else ():
        model.qkv[i][...] *= behind
    return both(model, **of_kind, **options)


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


class Wrong:
    """Drafts the token 0, so that a round gives the token that is sampled without it."""

    def check(self, n_vocab):
        pass

    def draft(self, context, n):
        return [0] * n


def counts(runtime):
    """Rounds and drafts so far."""
    stats = runtime.stats()
    return Counter(rounds=stats.n_rounds, drafted=stats.n_drafted, accepted=stats.n_accepted)


def generated(runtime, drafter, **asked):
    """Tokens and log-probabilities of a text with drafts.

    It ends while there is room for a round, so that no program of single steps is compiled.
    """
    runtime.clear()
    runtime.prefill(TEXT[:8])
    spec = Speculation(drafter=drafter, n_draft=N_DRAFT)
    n = N + N_DRAFT + 1
    tokens = list(islice(runtime.generate(n, speculation=spec, n_best=2, **asked), N))
    return [t.id for t in tokens], np.array([[p for _, p in t.best] for t in tokens])


def refuse(runtime, drafter):
    """Ends a text behind a round of which a draft was refused, whose cells no later token takes."""
    runtime.clear()
    runtime.prefill(TEXT[:8])
    before = runtime.stats()
    spec = Speculation(drafter=drafter, n_draft=N_DRAFT)
    for _ in runtime.generate(N + N_DRAFT, speculation=spec, n_best=2):
        now = runtime.stats()
        if now.n_drafted - now.n_accepted > before.n_drafted - before.n_accepted:
            return
    raise AssertionError("no draft was refused")


def same_text(whole, by_layer, drafter, **asked):
    """Text, log-probabilities, cache and counts are equal, and of the drafts some stayed."""
    before = counts(whole), counts(by_layer)
    (ids, best), (others, found) = (generated(x, drafter(), **asked) for x in (whole, by_layer))
    assert ids == others
    np.testing.assert_allclose(best, found, rtol=1e-4, atol=1e-4)
    same_cache(whole, by_layer)
    assert counts(whole) - before[0] == counts(by_layer) - before[1]
    new = counts(whole) - before[0]
    assert 0 < new["accepted"] < new["drafted"]
    names = {key.name for key in by_layer.programs.compiled()}
    assert not names & {"verify_round", "layer_skip", "forward"}
    assert names >= {"unwritten_layers", "accept_round", "write_layers"}
    assert by_layer.stats().programs.startswith("by_layer")
    for runtime in (whole, by_layer):
        refuse(runtime, drafter())
    same_cache(whole, by_layer)


# Other masks, frames of keys and types the matrix has by layer.
@pytest.mark.parametrize("name", first_fast(KINDS))
def test_a_round_gives_the_same(name):
    whole, by_layer = pair(name)
    # Both, so that what it leaves in cells that are cleared is the same.
    ids, others = (generated(x, Wrong())[0] for x in (whole, by_layer))
    assert ids == others
    text = TEXT[:8] + ids

    def script():
        made = Script(N_DRAFT, whole.programs.kind.model(whole.programs.params).n_vocab)
        made.texts = [text]
        return made

    same_text(whole, by_layer, script)
    sampling = Sampling(temp=0.9, seed=3, repeat_penalty=1.3, repeat_last_n=8)
    if name == "f16":
        same_text(whole, by_layer, script, sampling=sampling, stop_ids=(31,))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "behind"), [("window", 0.3), ("h2o", 0.3), ("retention", 1.0)])
def test_layers_that_draft_give_the_same(name, behind):
    """Of models whose other layers change little."""
    whole, by_layer = pair(name, behind=behind, in_numpy=contextlib.nullcontext)
    same_text(whole, by_layer, lambda: LayerSkip(exit_layer=1))


@pytest.mark.slow
def test_layers_that_draft_have_the_programs_of_single_steps():
    """Those before the exit; where it cuts a run of three, the parts have programs of their own."""
    runtime = both(KindedLm(n_vocab=32, n_layers=9), n_each=None)[1]
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
    """Texts of requests of which one has no drafts, and what became of the drafts."""
    texts = {}
    for i in range(3):
        tokens = tuple(TEXT[i : 9 + 3 * i])
        request = Request(id=str(i), tokens=tokens, n_predict=14, drafts=i != 1)
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            texts.setdefault(output.id, []).extend(output.tokens)
    return texts, engine.stats().drafts


def engine(name, mode, programs, model=None, **options):
    """One whose steps have 1 or 8 tokens; run whole it is in NumPy where it can be."""
    make, of_kind = KINDS[name]
    sizes = {"n_ctx": 128, "n_seq_max": 2, "block_size": 8, "n_ubatch": 8}
    config = CacheConfig(**{**sizes, **of_kind, "programs": programs})
    exact = contextlib.nullcontext() if programs == "by_layer" or name == "f16" else installed()
    with exact:
        return Engine(model or make(), config, EngineConfig(mode=mode, **options))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        slow("window", "cell"),
        *map(slow, ["window", "recurrent", "produced"], ["paged"] * 3),
    ],
)
def test_rounds_of_many_give_the_same(name, mode):
    whole_texts, found = served(engine(name, mode, "whole"))[0], []
    for programs in ("whole", "by_layer"):
        script = Script(N_DRAFT, KINDS[name][0]().n_vocab)
        script.texts = [TEXT[i : 9 + 3 * i] + whole_texts[str(i)] for i in range(3)]
        spec = Speculation(drafter=script, n_draft=N_DRAFT)
        at = engine(name, mode, programs, speculation=spec)
        found.append(served(at))
    names = {key.name for key in at.device.programs.compiled()}
    assert "accept_round" in names and "verify_round" not in names
    assert at.stats().programs.startswith("by_layer")
    assert found[0] == found[1] and found[0][0] == whole_texts
    assert 0 < found[0][1]["accepted"] < found[0][1]["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_layers_that_draft_for_many_give_the_same(mode):
    """All drafts stay where the other layer adds nothing, and texts are those without drafts."""
    spec = Speculation(drafter=LayerSkip(exit_layer=1), n_draft=N_DRAFT)
    for behind in (1.0, 0.0):
        model = KINDS["window"][0]()
        values = model.n_kv_heads * model.groups[0].head_dim
        model.qkv[1][...] = model.qkv[1][...].at[:, -values:].multiply(behind)
        at = engine("window", mode, "by_layer", model, speculation=spec)
        texts, drafts = served(at)
        assert "draft_tokens" in {key.name for key in at.device.programs.compiled()}
        assert texts == served(engine("window", mode, "whole", model))[0]
        assert 0 < drafts["accepted"] < drafts["drafted"] + (behind == 0.0)
        assert behind or drafts["accepted"] == drafts["drafted"]


BLENDS = {
    "full": 1,
    "window": 0,
    "produced": 0,
    "latent": 0,
    "quest": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLENDS)
def test_a_blend_gives_the_same(name):
    spec, found = BlendSpec(ratio=0.4, check_layer=BLENDS[name]), []
    select = Quest(n_cells=48, n_sink=0, n_recent=8) if name == "quest" else None
    kind = "full" if select else name
    runtimes = pair(kind, n_ctx=128, swa_full=True, select=select, in_numpy=contextlib.nullcontext)
    for runtime in runtimes:
        chunks = [runtime.chunk(TEXT[i : i + 13]) for i in (0, 20)]
        blended = runtime.blend(chunks, TEXT[40:45], spec)
        found.append((blended.computed.tolist(), np.asarray(blended.logits)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
    same_cache(*runtimes)
    names = {key.name for key in runtimes[1].programs.compiled()}
    assert names >= {"put_stream", "vacate_slots", "layers"} and "run_part" not in names


@pytest.mark.slow
def test_what_cells_are_attended_to_is_found_alike():
    gone = []
    for runtime in pair("full", n_ctx=64, in_numpy=contextlib.nullcontext):
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
        by_layer.prefill(TEXT[:8])
        return [t.id for t in by_layer.generate(6, speculation=spec)]

    wanted, run, n_runs = text(), StepByLayer.run, []
    by_layer.clear()
    by_layer.prefill(TEXT[:8])

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

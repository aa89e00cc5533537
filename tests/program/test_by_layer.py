"""A step in one program and in several gives the same, whatever the layers keep."""

import contextlib
import dataclasses
import itertools
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvrt import (
    CacheConfig,
    DoubleSparsity,
    Engine,
    MaskSpec,
    Request,
    Runtime,
)
from kvrt.attention.step_attention import StepAttention
from kvrt.errors import BadConfig
from kvrt.program import programs as compiled
from kvrt.program.layers.by_layer import Arrays, StepByLayer
from kvrt.program.layers.runs import layer_runs
from kvrt.program.layout import cell_layout
from kvrt.program.programs import layer_params
from kvrt_models.load import load
from tests.marks import full, slow
from tests.matrix.plainmodel import PlainModel
from tests.numpy_device.device import installed
from tests.toys import KindedLm, ToyLm

FOLDERS = sorted(p.parent for p in Path(__file__).parents[1].glob("golden/hf/*/config.json"))
QUICK = ("bamba", "gemma3n", "deepseek-v32")
MIXED = (*QUICK, "gemma4-experts", "qwen3-next-experts", "kimi-linear", "jamba-experts", "llama4")
# tests/models has the logits of every family, by layer.
SOME_MIXED = ("bamba", "gemma4-experts")
TEXT = np.random.default_rng(0).integers(0, 32, 70).tolist()
WINDOW = MaskSpec(kind="window", size=9)


def both(model, programs="by_layer", in_numpy=installed, n_each=1, **options):
    """A runtime that traces the model as it is, in NumPy where it can be, and one by its kinds.

    By layer a program has `n_each` layers; None is as many as users get.
    """
    sizes = {"n_ctx": 96, "n_seq_max": 2, "block_size": 16, "n_ubatch": 8, **options}
    policy = sizes.pop("policy", None)
    with in_numpy(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "reason_for_whole", lambda model: "as it is")
        plain = Runtime(model, CacheConfig(**sizes, programs="whole"), policy=policy)
    by_kind = Runtime(model, CacheConfig(**sizes, programs=programs), policy=policy)
    if n_each and programs == "by_layer":
        device = by_kind._cache.device
        device.by_layer = StepByLayer(device.programs, n_each=n_each)
    return [plain, by_kind]


def said(runtime):
    """Logits of a prompt in uneven steps, of single tokens and of a sequence that was cut."""
    found = [runtime.append(TEXT[:16], out_ids=range(16)), runtime.append(TEXT[16:39])]
    found += [x[None] for x in runtime.decode({0: TEXT[39]}).values()]
    runtime.append(TEXT[:7], 1)
    tokens = list(runtime.generate(30, n_best=2))
    found.append(np.array([[p for _, p in t.best] for t in tokens], np.float32))
    found += [x[None] for x in runtime.decode({0: 3, 1: 5}).values()]
    return [t.id for t in tokens], [np.asarray(x, np.float32) for x in found]


def alike(plain, by_kind, tolerance=1e-5):
    """Both give the same, and keep the same."""
    (ids, logits), (others, found) = said(plain), said(by_kind)
    assert ids == others
    for a, b in zip(logits, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    for a, b in zip(*(jax.tree.leaves(x.cache) for x in (plain, by_kind)), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-4, atol=1e-4
        )
    way, names = by_kind.config.programs, {k.name for k in by_kind.programs.compiled()}
    assert by_kind.stats().programs.startswith(way)
    some = {"by_layer": {"embed_step", "layers", "finish_step"}, "whole": {"forward"}}[way]
    assert some <= names


CHANNELS = tuple(((0, 3, 5, 9), (1, 2, 8, 12)) for _ in range(3))
CASES = {
    "channels": {"select": DoubleSparsity(n_cells=48, n_sink=0, n_recent=8, channels=CHANNELS)},
    "checkpoints": {"n_checkpoints": 2, "masks": (WINDOW, MaskSpec())},
}


def kinded(options):
    """A model for options of a cache, of which `masks` are its own."""
    # A selection leaves out the first two layers.
    n_layers = 3 if "select" in options else 2
    return KindedLm(n_vocab=32, n_layers=n_layers, masks=options.pop("masks", None))


# The matrix has all else in both ways, one layer a program.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same(name):
    options = dict(CASES[name])
    alike(*both(kinded(options), **options), tolerance=1e-4)


@pytest.mark.slow
def test_one_program_of_kinds_gives_the_same():
    options = dict(CASES["checkpoints"])
    alike(*both(kinded(options), "whole", **options), tolerance=1e-4)


def counted(patch):
    """The layers that attend while programs are traced."""
    called, attend = [], StepAttention.__call__

    def noted(self, layer, *args, **more):
        called.append(layer)
        return attend(self, layer, *args, **more)

    patch.setattr(StepAttention, "__call__", noted)
    return called


def test_a_whole_step_traces_a_run_of_each_kind_once():
    found = []
    sizes = {"n_ctx": 2048, "n_ubatch": 1}
    model, compiled_too = KindedLm(n_vocab=32, n_layers=9), contextlib.nullcontext
    for runtime in both(model, "whole", in_numpy=compiled_too, **sizes):
        with pytest.MonkeyPatch.context() as patch:
            called = counted(patch)
            found.append((called, runtime.append([1])))
        (program,) = runtime.programs.compiled().values()
        memory, stores = program.memory_analysis(), jax.tree.leaves(runtime.cache.stores)
        assert memory.alias_size_in_bytes >= sum(x.nbytes for x in stores)
        assert memory.temp_size_in_bytes < sum(x.nbytes for x in stores) // 9
    (every, plain), (once, by_kind) = found
    assert every == list(range(9)) and once == [0, 1, 2]
    np.testing.assert_allclose(plain, by_kind, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "folder",
    [slow(f) if f.name in SOME_MIXED else full(f) for f in FOLDERS if f.name in MIXED],
    ids=lambda f: f.name,
)
def test_families_whose_layers_differ_give_the_same(folder):
    with np.load(folder / "expected.npz") as data:
        tokens = data["tokens"].tolist()
    model, logits = load(folder).decoder, []
    for runtime in both(model, n_ctx=len(tokens), type_k="f32", type_v="f32"):
        found = [runtime.append(tokens[:20], out_ids=[3, 19])]
        found += [runtime.decode({0: t})[0][None] for t in tokens[20:23]]
        logits.append(np.concatenate([*found, runtime.append(tokens[23:40])]))
    np.testing.assert_allclose(*logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "folder",
    [f if f.name in QUICK else slow(f) for f in FOLDERS],
    ids=lambda f: f.name,
)
def test_layers_of_one_kind_compute_the_same(folder):
    """Traced with one layer's index or another's: one text, but for what attend is told."""
    model = load(folder).decoder
    params = nnx.split(model)[1]
    leaves, tree = jax.tree.flatten(params)
    kinds = layer_params(model, params)
    x = jnp.zeros((3, jax.eval_shape(model.embed, jnp.zeros(3, jnp.int32)).shape[1]))
    graph, texts = nnx.split(model)[0], {}
    for layer, kind in enumerate(kinds.kinds):

        def run(some, x, layer=layer):
            of_model = list(leaves)
            for i, value in zip(kinds.by_layer[layer], some, strict=True):
                of_model[i] = value
            decoder = nnx.merge(graph, jax.tree.unflatten(tree, of_model))
            return decoder.layers(x, Told(model), layer, layer + 1)

        mine = [leaves[i] for i in kinds.by_layer[layer]]
        texts.setdefault(kind, set()).add(str(jax.make_jaxpr(run)(mine, x)))
    assert all(len(of) == 1 for of in texts.values())
    assert sum(map(len, kinds.by_layer)) + len(kinds.rest) == len(leaves)


class Told:
    """Attends to nothing; what it is told is in the program's text."""

    def __init__(self, model):
        self.model = model

    def __call__(self, layer, q, k, v, *, sinks=None):
        group = next(g for g in self.model.groups if layer in g.all_layers)
        told = [jnp.sum(x) for x in (k, v, sinks) if x is not None]
        out = q[..., : group.latent_rank] if group.latent_rank else q
        return out * sum(told, jnp.float32(1)) * len(told)

    def produce(self, layer, k, v):
        pass

    def index(self, layer, q, k, weights):
        pass

    def recur(self, layer, step, inputs, *, chunk=None):
        spec = self.model.recurrent
        shapes = spec.arrays[spec.layers.index(layer)]
        state = tuple(jnp.zeros(of.shape, jnp.float32) for of in shapes)
        return jax.lax.scan(step, state, inputs)[1]


@pytest.mark.slow
def test_an_engine_gives_the_same():
    found = []
    for programs in ("whole", "by_layer"):
        config = CacheConfig(n_ctx=96, n_seq_max=3, block_size=8, n_ubatch=8, programs=programs)
        model, texts = KindedLm(n_vocab=32, masks=(WINDOW, MaskSpec())), {}
        with installed() if programs == "whole" else contextlib.nullcontext():
            engine = Engine(model, config)
        for i in range(4):
            engine.add_request(Request(id=str(i), tokens=tuple(TEXT[i : 20 + i]), n_predict=12))
        while engine.has_work:
            for output in engine.step():
                texts.setdefault(output.id, []).extend(output.tokens)
        found.append(texts)
        assert engine.stats().programs.startswith(programs)
    assert found[0] == found[1] and len(found[0]) == 4


@pytest.mark.parametrize(
    ("masks", "wanted"),
    [
        ([MaskSpec()] * 30, [(0, 5, 0), *((i, i + 5, 0) for i in range(5, 30, 5))]),
        (([WINDOW] * 5 + [MaskSpec()]) * 3, [(0, 6, 0), (6, 12, 0), (12, 18, 0)]),
        ([WINDOW, MaskSpec()], [(0, 2, 0)]),
    ],
)
def test_runs_weigh_what_is_compiled_against_dispatches(masks, wanted):
    group, config = ToyLm().groups[0], CacheConfig(n_ctx=64, block_size=16)
    by_mask = {}
    for i, mask in enumerate(masks):
        by_mask.setdefault(mask, []).append(i)
    groups = [
        dataclasses.replace(group, layers=tuple(of), mask=mask) for mask, of in by_mask.items()
    ]
    config = config.for_platform("cpu")
    runs = layer_runs(cell_layout(groups, None, config), masks, None)
    assert [(x.first, x.last, x.like) for x in runs] == wanted


def test_equal_layers_have_one_program():
    runtime = both(KindedLm(n_vocab=32, n_layers=9), n_each=None)[1]
    runtime.append(TEXT[:5])
    names = [key.name for key in runtime.programs.compiled()]
    assert sorted(names) == ["embed_step", "finish_step", "head", "layers"]
    runs = runtime._cache.device.by_layer.runs
    assert len(runs) == 3 and {x.like for x in runs} == {0}
    for a, b in itertools.pairwise(runs):
        assert a.last == b.first


def test_ctrl_c_between_the_programs_of_a_step_waits_for_its_end(monkeypatch):
    put, calls = Arrays.put, []

    def interrupting(self, part, new):
        calls.append(part)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        put(self, part, new)

    model = PlainModel("full+recurrent", has_front=True)
    disturbed, plain = (both(model, n_ubatch=16)[1] for _ in range(2))
    for runtime in (disturbed, plain):
        runtime.append(TEXT[:16])
        runtime.decode({0: 5})
    monkeypatch.setattr(Arrays, "put", interrupting)
    with pytest.raises(KeyboardInterrupt) as found:
        disturbed.append(TEXT[16:51])
    assert "16 of 35 tokens were evaluated and stay" in found.value.__notes__[0]
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        disturbed.decode({0: 7})
    disturbed.decode({0: 9})
    tokens = disturbed.generate(9)
    first = next(tokens).id
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        next(tokens)
    monkeypatch.undo()
    plain.append(TEXT[16:32])
    for token in (7, 9, first):
        plain.decode({0: token})
    assert disturbed.seq_pos_max(0) == plain.seq_pos_max(0)
    logits = [np.asarray(x.decode({0: 3})[0]) for x in (plain, disturbed)]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


def test_no_program_of_some_layers_copies_their_arrays():
    runtime = both(KindedLm(n_vocab=32, n_layers=4), n_each=None, n_ctx=2048, n_ubatch=1)[1]
    runtime.append([1])
    layer = sum(x.nbytes for x in jax.tree.leaves(runtime.cache.stores)) // 4
    for key, program in runtime.programs.compiled().items():
        if key.name == "layers":
            memory, (first, last, *_) = program.memory_analysis(), key.static[1]
            assert memory.alias_size_in_bytes >= layer * (last - first)
            assert memory.temp_size_in_bytes < layer


def test_a_model_that_does_not_tell_its_layers_apart_runs_whole_and_says_why():
    config = CacheConfig(n_ctx=32, block_size=8, programs="by_layer")
    with pytest.raises(BadConfig, match=r"ToyLm does not tell its layers apart .* use 'whole'"):
        Runtime(ToyLm(), config)
    runtime = Runtime(ToyLm(), dataclasses.replace(config, programs="auto"))
    assert runtime.config.programs == "whole"
    assert "does not tell its layers apart by kind" in runtime.stats().programs

    class Fewer(KindedLm):
        def layer_kinds(self):
            return super().layer_kinds()[1:]

    with pytest.raises(
        BadConfig, match=r"layer_kinds\(\) has 1 layers, and groups .* have 2; name"
    ):
        Runtime(Fewer(n_layers=2), config)

    class Otherwise(KindedLm):
        def layers(self, x, attend, first, last):
            return super().layers(x, attend, first, last) * 2

    runtime = Runtime(Otherwise(n_layers=2), dataclasses.replace(config, programs="auto"))
    said = "whole: Otherwise has layers of its own, and no layer_kinds"
    assert runtime.stats().programs == said

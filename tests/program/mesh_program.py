"""What eight devices give beside one, in a process of its own: prints a JSON object of findings.

Run by `test_mesh.py`; JAX takes the number of simulated devices from the environment at its start.
"""

import dataclasses
import functools
import gc
import json
import re
import sys
import tempfile
import time
import unittest.mock
import warnings
from pathlib import Path

import jax
import jax.export
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from kvrt import CacheConfig, Runtime, SelfExtend, session
from kvrt.attention import attend
from kvrt.attention import view as views
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.policies import ContextShift
from kvrt.program.mesh import MeshSpec, Placement
from kvrt.serving.engine import Engine
from kvrt.session.orbax import rows
from kvrt.store.shards import Shards
from kvrt_models import load
from scripts._lib import chips
from tests import interpreted
from tests.attention import kernel_cases
from tests.peer.tiny_gguf import TinyModel, write_gguf
from tests.serving.engines import WINDOWS, ask
from tests.toys import HybridLm, KindedLm, RowModel, ToyLm

TOKENS = np.random.default_rng(0).integers(0, 32, 40)
F32 = {"type_k": "f32", "type_v": "f32"}
SIZES = CacheConfig(n_ctx=48, n_seq_max=2, block_size=4, n_ubatch=8, **F32)
ALL = "tensor=2,context=4"
FOUR = "tensor=2,context=2"
COLLECTIVE = re.compile(
    r"= \(?(.*?)\)? (?:all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)"
)
SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")
# Keys at exact and at grouped positions.
EXTEND = SelfExtend(ga_n=2, ga_w=8, kind="paper")
# A kernel, on what mesh, and when keys are turned.
READ = [
    ("pallas_gpu", "tensor=2", "write"),
    ("pallas_gpu", "context=2", "write"),
    ("pallas_gpu", ALL, "read"),
    ("pallas_tpu", FOUR, "write"),
]
HALF = kernel_cases.Form(heads=4, d=128, blocks=8, k="bf16", v="bf16", dtype="bfloat16")
ROWS = dataclasses.replace(HALF, tokens=2, rows=True, sinks=True)
LOWERED = {
    "cuda": ("pallas_gpu", chips.GPU_CALL, ROWS),
    "rocm": ("pallas_gpu", chips.GPU_CALL, HALF),
    "tpu": ("pallas_tpu", "tpu_custom_call", dataclasses.replace(HALF, block=256)),
}
OPERANDS = re.compile(r": \((tensor<.*?)\) -> ")
# A cache, its model, its mesh: heads and cells divided, quantized, with states and heads undivided.
DIVIDED = [
    ("f32", "full", ALL, {}),
    ("int8", "full", ALL, {"type_k": "int8", "type_v": "bf16"}),
    ("states", "recurrent", ALL, {}),
]
MODELS = {
    "full": functools.partial(ToyLm, n_layers=1),
    # Its attention is its logits: as many heads and channels as it has tokens.
    "heads": functools.partial(RowModel, n_heads=8, n_kv_heads=8, head_dim=4),
    "window": functools.partial(ToyLm, n_layers=1, masks=WINDOWS[1:2]),
    "recurrent": HybridLm,
    "kinded": functools.partial(KindedLm, n_vocab=32, n_layers=4, masks=WINDOWS[:2] * 2),
}


def mesh(text):
    return MeshSpec.parse(text)


@functools.cache
def runtime(kind, where="", **options):
    """One that cases share, so that programs compile once."""
    config = dataclasses.replace(SIZES, **options)
    return Runtime(MODELS[kind](), config, mesh=mesh(where) if where else None)


def life(runtime):
    """Logits of a prompt, of another sequence, and after a removal, a shift and a defrag."""
    runtime.clear()
    logits = [runtime.append(TOKENS[:29]), runtime.append([5, 6], 1)]
    if runtime.can_remove(0, 5, 12):
        runtime.seq_rm(0, 5, 12)
        runtime.seq_add(0, 12, None, -7)
        logits.append(runtime.append([9, 3]))
        runtime.defrag(by_sequence=True)
    logits.append(runtime.append([10, 4]))
    return [np.asarray(x) for x in logits]


def compared(kind, *meshes, **options):
    """The greatest difference from one device, as a part of the greatest logit, by mesh."""
    want = life(runtime(kind, **options))
    top = max(float(np.abs(x).max()) for x in want)
    found = {}
    for where in meshes:
        got = life(runtime(kind, where, **options))
        found[where] = max(float(np.abs(a - b).max()) for a, b in zip(want, got, strict=True)) / top
    return found


def kernels():
    """As `compared`, what kernels make of a prompt, of another sequence, and behind a hole."""
    want = read(runtime("full"))
    top = max(float(np.abs(x).max()) for x in want)
    found = {}
    for attention, where, rope in READ:
        got = read(runtime("full", where, attention=f"{attention}_interpret", rope=rope))
        differs = max(float(np.abs(a - b).max()) for a, b in zip(want, got, strict=True))
        found[f"{attention}, {where}, {rope}"] = differs / top
    return found


def read(runtime):
    runtime.clear()
    logits = [runtime.append(TOKENS[:21]), runtime.append([5, 6], 1)]
    runtime.seq_rm(0, 5, 12)
    return [np.asarray(x) for x in (*logits, runtime.append([9, 3]))]


def lowered():
    """What kernels are called with on GPUs and TPUs where eight devices divide 8 blocks by 4."""
    on = Placement(mesh(ALL)).shards.mesh
    like = {"axis_types": on.axis_types, "abstract_device": chips.H200}
    gpus = Shards(AbstractMesh(on.axis_sizes, on.axis_names, **like))
    found = {}
    for platform, (attention, call, form) in LOWERED.items():
        shards = Shards(on) if platform == "tpu" else gpus

        def run(tokens, rows, view, sinks, form=form, attention=attention, shards=shards):
            view = views.shard_view(shards, view)
            how = {"implementation": attention}
            return attend(*kernel_cases.bundled(form, tokens, rows, view, sinks, **how))

        run = jax.jit(run, in_shardings=NamedSharding(on, PartitionSpec()))
        shapes = kernel_cases.shapes(form)
        allowed = chips.GPU_CALLS_ALLOWED
        exported = jax.export.export(run, platforms=[platform], disabled_checks=allowed)(*shapes)
        lines = exported.mlir_module().splitlines()
        # A second one ends what the first has read.
        line = next(x for x in lines if f"stablehlo.custom_call @{call}(" in x)
        operands = OPERANDS.findall(line)[-1]
        keys = (form.blocks // 4, form.kv_heads // 2, form.d, form.block)
        found[platform] = [exported.nr_devices, operands.count("x".join(map(str, keys)))]
    return found


def decoder():
    """A real decoder with experts, biases and attention sinks; its weights come from the host."""
    config = dataclasses.replace(SIZES, n_seq_max=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_gguf(path, TinyModel(arch="gpt-oss", n_layers=1))
        on_one = Runtime(load.load(path, dtype="f32").decoder, config)
        divided = load.open_model(path, dtype="f32", on_host=True).wait().decoder
        on_many = Runtime(divided, config, mesh=mesh(ALL))
        want, got = (np.asarray(x.append(TOKENS[:21])) for x in (on_one, on_many))
    assert on_one.fingerprint == on_many.fingerprint
    weights = [x for x in on_many.programs.params if not x.is_fully_replicated]
    return {
        ALL: float(np.abs(want - got).max() / np.abs(want).max()),
        "divided": len(weights),
        "halves": all(2 * x.addressable_shards[0].data.size == x.size for x in weights),
    }


def shifted():
    """Tokens of one device and of eight while the context shifts, and what went for that."""

    def tokens(**where):
        config = dataclasses.replace(SIZES, n_ctx=24, n_seq_max=1)
        runtime = Runtime(MODELS["full"](), config, policy=ContextShift(n_keep=3), **where)
        runtime.append(TOKENS[:20])
        return [t.id for t in runtime.generate(24)], runtime.stats().n_dropped

    return {"one": tokens(), "many": tokens(mesh=mesh(ALL))}


def kept_whole():
    """One kv head on two devices that divide heads: what is said, and how the rows lie."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = compared("recurrent", "tensor=2,context=4")
    cache = runtime("recurrent", "tensor=2,context=4").cache
    shape = cache.stores[0].k[0].addressable_shards[0].data.shape
    return {"said": [str(x.message) for x in said], "shape": shape, "differs": found}


def programs():
    """Bytes of each compiled program on a device, and the greatest array that travels."""
    config = CacheConfig(n_ctx=4096, n_seq_max=1, block_size=16, n_ubatch=8, **F32)
    runtime = Runtime(MODELS["full"](), config, mesh=mesh(ALL))
    runtime.append(TOKENS[:16])
    runtime.seq_rm(0, 2, 4)
    runtime.seq_add(0, 4, None, -2)
    runtime.defrag(by_sequence=True)
    runtime.scrub()
    runtime.restore(runtime.snapshot())
    device = runtime._cache.device
    block = np.asarray(device.take_blocks(0, [0]))
    device.put_blocks(0, [200], block)
    copied = np.asarray(device.take_blocks(0, [200]))
    layers = jax.tree.leaves(runtime.cache.stores)
    found = {}
    for key, program in runtime.programs.compiled().items():
        memory, moved = program.memory_analysis(), [0]
        for shapes in COLLECTIVE.findall(program.as_text()):
            moved += [
                int(np.prod([int(n) for n in x.split(",") if n])) for x in SHAPE.findall(shapes)
            ]
        found[str(key[0])] = {
            "alias": memory.alias_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
            "moved": max(moved),
        }
    own = [x.addressable_shards[0].data for x in layers]
    return {
        "programs": found,
        "blocks": [bool(block.any()), bool((block == copied).all())],
        "own": sum(x.nbytes for x in own),
        "all": sum(x.nbytes for x in layers),
        "layer": layers[0].size,
        "own_layer": own[0].size,
    }


def saved():
    """A session of eight devices on one and on others: tokens that follow, and what they differ.

    And whether one device holds the very rows that eight had, and eight those of one.
    """
    many, one, back = (runtime("full", where) for where in (ALL, "", "context=8"))
    many.clear()
    many.append(TOKENS[:21])
    many.seq_rm(0, 3, 6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.kv"
        session.save(path, many.snapshot())
        one.restore(session.read(path))
        back.restore(one.snapshot())
    rows = [
        b"".join(
            np.asarray(x).tobytes() for b in at.snapshot().groups[0].blocks for x in (b.k, b.v)
        )
        for at in (many, one, back)
    ]
    after = [np.asarray(x.append([9, 3])) for x in (many, one, back)]
    return {
        "ids": [int(x.argmax()) for x in after],
        "differs": float(max(np.abs(x - after[1]).max() for x in after) / np.abs(after[1]).max()),
        "rows": [len(rows[0]), rows[0] == rows[1] == rows[2]],
    }


def divided():
    """Sessions that eight devices write where they are, on one device and on other meshes.

    By cache whether each holds the very arrays that eight had, how large the greatest array is that
    came to the host or went to Orbax as one shard, and that of a round; and what travelled.
    """
    found = {}
    for name, kind, where, options in DIVIDED:
        many = runtime(kind, where, **options)
        many.clear()
        many.append(TOKENS[:37])
        many.append([5, 6, 7], 1)
        if many.can_remove(1, 2, 3):
            many.seq_rm(1, 2, 3)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "many.kvd"
            sizes = written_alone(path, many.snapshot(divided=True))
            loaded = [runtime(kind, to, **options) for to in ("", "context=8")]
            for one in loaded:
                one.restore(session.read(path))
        want, *got = (rows_of(one) for one in (many, *loaded))
        moved = [
            COLLECTIVE.findall(program.as_text())
            for key, program in many.programs.compiled().items()
            if key[0] == "take_own"
        ]
        found[name] = [want == x for x in got], *sizes, moved
    return found


def written_alone(path, taken):
    """Saves what devices hold; bytes of the greatest array on the host, in a shard, of a round."""
    on_host, shards, rounds, real = [], [], [], np.asarray

    def as_array(x, *more, **options):
        found = real(x, *more, **options)
        on_host.extend([found.nbytes] * isinstance(x, jax.Array))
        return found

    def write(at, tree):
        for x in jax.tree.leaves(tree):
            rounds.append(x.nbytes)
            shards.extend(s.data.nbytes for s in x.addressable_shards)
        orbax(at, tree)

    orbax = rows.write.write_own_shards
    kv_only = dataclasses.replace(taken, logits={}, states=None)
    kv_only = dataclasses.replace(kv_only, fingerprint={**taken.fingerprint, "recurrent": None})
    with unittest.mock.patch.object(np, "asarray", as_array):
        with unittest.mock.patch.object(rows.write, "write_own_shards", write):
            session.save(path.with_name("kv_only"), kv_only, "folder")
    session.save(path, taken, "folder")
    return max(on_host), max(shards), max(rounds)


def rows_of(runtime):
    """All keys, values and states of a runtime, as bytes."""
    taken = runtime.snapshot()
    arrays = [(b.k, b.v) for g in taken.groups for b in g.blocks]
    arrays.append(taken.states and taken.states.tables)
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(arrays))


# A whole step and a rest, so that a hit leaves a step to compute that a miss computes too.
REQUEST = ask("miss", TOKENS[:11], 5)


def engine(mode, where, kind="heads", **options):
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=4, n_ubatch=8, **F32 | options)
    on = mesh(where) if where else None
    options = EngineConfig(mode=mode, rules=Rules(n_batch=8))
    return Engine(MODELS[kind](), config, options, mesh=on)


@functools.cache
def alone():
    """Tokens and logits of one device."""
    return run_one(engine("paged", ""), REQUEST)


def served(where, **options):
    """A miss and a hit of an engine in blocks, beside one device, and each other."""
    (tokens, base), paged = alone(), engine("paged", where, **options)
    miss, hit = (run_one(paged, dataclasses.replace(REQUEST, id=x)) for x in ("miss", "hit"))
    worst = max(float(np.abs(x[1] - base).max()) for x in (miss, hit))
    return miss, {
        "differs": worst / float(np.abs(base).max()),
        "tokens": tokens == miss[0] == hit[0],
        "as_missed": miss[1].tobytes() == hit[1].tobytes(),
    }


def cells_too(where):
    """As `served`, and whether an engine in cells gives the same bits."""
    miss, found = served(where)
    cells = run_one(engine("cell", where), REQUEST)
    return found | {"as_cells": cells[1].tobytes() == miss[1].tobytes()}


def by_layer():
    """A runtime and an engine by layer beside one device whole: differences, and what they say."""
    whole, at = runtime("kinded", programs="whole"), runtime("kinded", FOUR, programs="by_layer")
    one = engine("paged", "", "kinded", programs="whole")
    many = engine("paged", FOUR, "kinded", programs="by_layer")
    wanted, found = run_one(one, REQUEST), run_one(many, REQUEST)
    pairs = [*zip(life(whole), life(at), strict=True), (wanted[1], found[1])]
    return {
        "differs": [float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs],
        "tokens": wanted[0] == found[0],
        "said": [x.stats().programs for x in (at, many)],
        "n_programs": sum(key.name == "layers" for key in at.programs.compiled()),
    }


def run_one(engine, request):
    tokens, logits = served_by(engine, [request])
    key = (request.id, 0)
    return tokens[key], logits[key]


def served_by(engine, asked):
    tokens, logits = {}, {}
    for request in asked:
        engine.add_request(request)
    while engine.has_work:
        for out in engine.step():
            assert out.error is None, out.error
            key = (out.id, out.sample)
            tokens.setdefault(key, []).extend(out.tokens)
            if out.tokens:
                logits.setdefault(key, []).append(np.asarray(engine.logits(*key)))
    return tokens, {key: np.stack(x) for key, x in logits.items()}


CASES = {
    "full": functools.partial(compared, "full", "tensor=2", "context=8", ALL),
    "heads": functools.partial(compared, "heads", "tensor=4,context=2"),
    "raw": functools.partial(compared, "full", ALL, rope="read", self_extend=EXTEND),
    "grouped": functools.partial(compared, "full", ALL, self_extend=EXTEND),
    "coded": functools.partial(compared, "full", ALL, type_k="int8", type_v="int8"),
    "window": functools.partial(compared, "window", "context=8"),
    "kernels": kernels,
    "lowered": lowered,
    "decoder": decoder,
    "recurrent": kept_whole,
    "shifted": shifted,
    "saved": saved,
    "divided": divided,
    "served": lambda: served(ALL)[1],
    "served_by_kernels": lambda: served(FOUR, attention=interpreted.GPU)[1],
    "by_layer": by_layer,
    "bits": functools.partial(cells_too, "tensor=8"),
    "programs": programs,
}


def main(names):
    gc.set_threshold(50_000, 20, 20)  # as in conftest.py
    for name in names or CASES:
        # Bits and bytes are of programs as users get them; the others need no optimisation.
        jax.config.update("jax_disable_most_optimizations", name not in ("programs", "bits"))
        start = time.perf_counter()
        found = CASES[name]()
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Sample files of every kind that kvrt writes, and what they hold, for the tests of older formats.

`python tests/session/samples.py FOLDER` writes them into a new folder with the kvrt that it
imports, and beside them `expected.json`: what each file says, and what a runtime generates from it.
See tests/data/before_16/README.md.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path += [str(Path(__file__).parents[i]) for i in (1, 2)]
sys.path += [str(Path(__file__).parents[1] / "peer")]

from kvrt import (
    CacheConfig,
    Engine,
    EngineConfig,
    MaskSpec,
    Request,
    Runtime,
    Sampling,
    SelfExtend,
    TierConfig,
    session,
)
from kvrt.cli import main as cli
from kvrt.session.fingerprint import digest as fingerprint_digest
from kvrt.session.interop import llama, mlx
from kvrt.session.library.library import Library
from kvrt.store import codec
from tests.toys import HybridLm, ToyLm

WINDOW = MaskSpec(kind="window", size=6)
SAMPLING = Sampling(temp=0.7, top_k=20, seed=5)
N_NEXT = 8


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 32, n).tolist()


@dataclasses.dataclass(frozen=True)
class Sample:
    """A toy model, the options of its cache, and what was done before the session was saved."""

    model: object
    options: dict
    n: int = 40


def toy():
    return ToyLm()


def both():
    return ToyLm(masks=(MaskSpec(), WINDOW))


def wide():
    return ToyLm(n_layers=1, head_dim=64)


SAMPLES = {
    "f32": Sample(toy, {}),
    "bf16_read": Sample(toy, {"type_k": "bf16", "type_v": "bf16", "rope": "read"}),
    "int8": Sample(toy, {"type_k": "int8", "type_v": "int8"}),
    "int4_hadamard": Sample(wide, {"type_k": "int4", "type_v": "int4", "hadamard": True}),
    "kivi_q8_0": Sample(wide, {"type_k": "kivi4", "type_v": "q8_0", "block_size": 32}),
    "window_mixed": Sample(both, {"type_k": ("f16", "int8"), "type_v": "f16"}),
    "recurrent": Sample(HybridLm, {"n_rs_seq": 2}),
    "sequences": Sample(toy, {"type_k": "f16", "type_v": "f16"}, n=20),
    "extend_cache": Sample(toy, {"self_extend": SelfExtend(ga_n=2, ga_w=8)}),
    "extend_paper": Sample(
        toy, {"self_extend": SelfExtend(ga_n=2, ga_w=8, kind="paper"), "rope": "read"}
    ),
}
LONG = Sample(lambda: ToyLm(n_layers=1), {"type_k": "f16", "type_v": "f16", "n_ctx": 1024})
PLAIN = Sample(toy, {"type_k": "f16", "type_v": "f16"})
CLI = ("-p", "the sand", "-n", "12", "--temp", "0.5", "--seed", "3", "--n_ctx", "128")
BATCH = ("--n_ctx", "128", "--n_seq_max", "2", "--n_predict", "5", "--temp", "0")


def open_runtime(sample):
    sizes = {"n_ctx": 64, "n_seq_max": 3, "block_size": 16, "n_ubatch": 8}
    return Runtime(sample.model(), CacheConfig(**{**sizes, **sample.options}))


def filled(name, sample):
    """A runtime with something to save, and where its sampling was left."""
    runtime = open_runtime(sample)
    runtime.append(tokens(sample.n))
    if name != "sequences":
        return runtime, {}
    runtime.seq_cp(0, 1)
    runtime.append(tokens(5, seed=1), 1)
    runtime.append(tokens(7, seed=2), 2)
    drawn = [t.id for t in runtime.generate(6, 1, sampling=SAMPLING)]
    return runtime, {
        1: session.SamplingState(token=drawn[-1], n_drawn=6, sampling=vars_of(SAMPLING))
    }


def vars_of(spec):
    return {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}


def next_tokens(sample, snapshot):
    """What a runtime generates from each sequence of a snapshot, greedily."""
    runtime = open_runtime(sample)
    runtime.restore(snapshot)
    out = {}
    for s in snapshot.seq_ids:
        draw = snapshot.draws.get(s)
        if draw is not None and draw.token is not None:
            runtime.append([draw.token], s)
        out[str(s)] = [t.id for t in runtime.generate(N_NEXT, s)]
    return out


def said(snapshot):
    """All that a snapshot says, as JSON values; keys and values by digest and by mean size."""
    groups = [
        {
            "n_cells": g.n_cells,
            "pos": g.pos.tolist(),
            "seqs": g.seqs.tolist(),
            "lost": {str(s): [list(x) for x in spans] for s, spans in g.lost.items()},
            "k": of_rows([b.k for b in g.blocks]),
            "v": of_rows([b.v for b in g.blocks]),
        }
        for g in snapshot.groups
    ]
    texts = {s: np.concatenate(list(x), axis=1) for s, x in snapshot.history.pieces.items()}
    states = snapshot.states
    return {
        "groups": groups,
        "states": None
        if states is None
        else {
            "held": {str(s): [list(map(int, x)) for x in held] for s, held in states.held.items()},
            "sha256": sha256(jax.tree.leaves(states.tables)),
        },
        "pos": {str(s): x[0].tolist() for s, x in texts.items()},
        "tokens": {str(s): x[1].tolist() for s, x in texts.items()},
        "exact": {str(s): n for s, n in snapshot.history.exact.items()},
        "ga_i": {str(s): n for s, n in snapshot.ga_i.items()},
        "logits": {
            str(s): [int(pos), sha256([x])] for s, (pos, x) in sorted(snapshot.logits.items())
        },
        "draws": {
            str(s): [d.token, d.n_drawn, *map(list, sorted(d.sampling.items()))]
            for s, d in snapshot.draws.items()
        },
    }


def of_rows(blocks):
    """Digest of the arrays as the file has them, and the mean size of the values they stand for."""
    values = [np.asarray(codec.decode(x, -1), np.float32) for x in blocks]
    mean = np.abs(np.concatenate(values, axis=1)).mean(axis=(1, 2, 3)) if values else np.zeros(0)
    return {"sha256": sha256(jax.tree.leaves(blocks)), "mean": mean.tolist()}


def sha256(arrays):
    hashed = hashlib.sha256()
    for x in arrays:
        x = np.asarray(x)
        hashed.update(f"{x.dtype.name}{list(x.shape)}".encode())
        hashed.update(np.ascontiguousarray(x).tobytes())
    return hashed.hexdigest()


def ask(name, n_predict=5):
    return Request(id=name, tokens=tuple(tokens(40, seed=7)), n_predict=n_predict)


def serve(folder):
    """(tokens, how many of the prompt's came from the cache) of a request to a tiered Engine."""
    tiers = TierConfig(host_bytes=1 << 16, disk=folder, disk_bytes=1 << 18, always=True)
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=4, n_ubatch=16)
    out, n_cached = [], 0
    with Engine(toy(), config, EngineConfig(mode="paged", tiers=tiers)) as engine:
        engine.add_request(ask("a"))
        while engine.has_work:
            for found in engine.step():
                out += found.tokens
                n_cached = max(n_cached, found.n_cached)
    return [int(t) for t in out], int(n_cached)


def kvrt(*args):
    code = cli.main([str(a) for a in args])
    assert code == 0, args


# --- writing ---------------------------------------------------------------------------------


def write_sessions(folder):
    out = {}
    for name, sample in SAMPLES.items():
        runtime, draws = filled(name, sample)
        session.save(folder / f"{name}.kv", runtime.snapshot(draws))
        found = session.read(folder / f"{name}.kv")
        out[name] = said(found) | {"next": next_tokens(sample, found)}
    return out


def write_long(folder):
    """A file that was made longer twice."""
    runtime, n = open_runtime(LONG), []
    for i, more in enumerate((520, 60, 60)):
        runtime.append(tokens(more, seed=i))
        n.append(session.save(folder / "longer.kv", runtime.snapshot()).n_written)
    assert n[0] > n[1] > 0, n
    found = session.read(folder / "longer.kv")
    return said(found) | {"next": next_tokens(LONG, found)}


def write_foreign(folder):
    """An Orbax checkpoint, and files of llama.cpp and of mlx-lm."""
    runtime, _ = filled("", PLAIN)
    snapshot, groups = runtime.snapshot(), toy().groups
    session.save(folder / "orbax", snapshot, "folder")
    for name, whole in (("whole", True), ("sequence", False)):
        with open(folder / f"llama_{name}.bin", "wb") as file:
            llama.write(file, snapshot, groups, arch="llama", whole=whole, seq_id=None)
    with open(folder / "mlx.safetensors", "wb") as file:
        mlx.write(file, snapshot, groups, arch="llama")
    return {name: said(x) | {"next": next_tokens(PLAIN, x)} for name, x in foreign(folder).items()}


def foreign(folder):
    """What these files hold."""
    here, groups = open_runtime(PLAIN).fingerprint, toy().groups
    about = {"arch": "llama", "n_vocab": 64}
    return {
        "orbax": session.read(folder / "orbax"),
        "llama_whole": llama.read(folder / "llama_whole.bin", here, groups, **about),
        "llama_sequence": llama.read(folder / "llama_sequence.bin", here, groups, **about),
        "mlx": mlx.read(folder / "mlx.safetensors", here, groups, **about),
    }


def write_library(folder):
    """Three sessions of one model, and their index; a file is known by its time as well."""
    at = Library(folder / "library")
    out = {}
    for i, name in enumerate(("a.kv", "b.kv", "c.kv")):
        runtime = open_runtime(PLAIN)
        runtime.append(tokens(10 + 4 * i))
        snapshot = runtime.snapshot()
        path = at.folder / name
        n = session.save(path, snapshot).n_bytes
        at.add(path, fingerprint_digest(snapshot.fingerprint), tokens(10 + 4 * i), n)
        out[name] = path.stat().st_mtime_ns
    return out


def write_commands(folder):
    """A session of `kvrt run` and results of `kvrt batch`, with their model."""
    import tiny_gguf

    model = folder / "tiny.gguf"
    small = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "n_ff": 32}
    tiny_gguf.write_gguf(model, tiny_gguf.TinyModel(**small))
    kvrt("run", "-m", model, *CLI, "--session", folder / "run.kv", "--session_all", "--quiet")
    lines = [{"id": str(i), "prompt": text} for i, text in enumerate(("the", "sand", "of the"))]
    (folder / "batch.in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    given = ("-i", folder / "batch.in.jsonl", "-o", folder / "batch.out.jsonl")
    kvrt("batch", "-m", model, *given, *BATCH)
    found = session.read(folder / "run.kv")
    return said(found)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    expected = {
        "sessions": write_sessions(folder),
        "longer": write_long(folder),
        "foreign": write_foreign(folder),
        "library": write_library(folder),
        "run": write_commands(folder),
    }
    (folder / "tier").mkdir()
    first = serve(folder / "tier")
    expected["tier"] = [*first, *serve(folder / "tier")]
    for lock in folder.rglob(".*.lock"):
        lock.unlink()
    (folder / "expected.json").write_text(json.dumps(expected, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

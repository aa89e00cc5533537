"""Damages a session file in many ways: each must be refused, or read as what was saved.

Run it with `python scripts/fuzz_session.py`; --n=10000 mutated files. The session is of a small
model of its own, and every file is read in this process, whose memory is told at the end.
"""

import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags
from toy_decoder import ToyDecoder

from kvrt import CacheConfig, Runtime, session
from kvrt.errors import BadSession
from kvrt.session import blobs, parts

_N = flags.DEFINE_integer("n", 10_000, "Mutated files.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the mutations.")

KINDS = ("flip", "head", "cut", "add", "zero", "put", "swap", "drop")
_N_HEAD = 1100  # bytes of the first page that say something


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    rng, counts, slowest = np.random.default_rng(_SEED.value), Counter(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.kv"
        taken = sound_session()
        session.save(path, taken)
        data, expected = path.read_bytes(), digests(taken)
        for _ in range(_N.value):
            changed = data
            for _ in range(int(rng.integers(1, 4))):
                changed = mutated(changed, rng)
            path.write_bytes(changed)
            start = time.perf_counter()
            try:
                counts["same" if digests(session.read(path)) == expected else "wrong"] += 1
            except BadSession:
                counts["refused"] += 1
            slowest = max(slowest, time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**counts, "slowest_s": round(slowest, 3), "peak_mb": peak // 1024}))
    return 1 if counts["wrong"] else 0


def sound_session() -> session.Snapshot:
    """Three hundred tokens of a small model."""
    runtime = Runtime(ToyDecoder(), CacheConfig(n_ctx=512, n_ubatch=64))
    runtime.append(np.random.default_rng(1).integers(0, runtime.n_vocab, 300).tolist())
    return runtime.snapshot()


def digests(snapshot: session.Snapshot) -> list[str]:
    """What a snapshot holds, short enough to compare."""
    said = [str(snapshot.fingerprint), str([(g.n_cells, g.head, g.lost) for g in snapshot.groups])]
    return [*said, *(blobs.digest(tensors)[1] for tensors in parts.to_tensors(snapshot))]


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """The bytes with one thing wrong; what is empty stays so."""
    if not data:
        return data
    kind = KINDS[rng.integers(len(KINDS))]
    out = bytearray(data)
    at, n = int(rng.integers(len(data))), int(rng.integers(1, 600))
    if kind in ("flip", "head"):
        out[at if kind == "flip" else at % min(_N_HEAD, len(data))] ^= 1 << int(rng.integers(8))
    elif kind == "cut":
        del out[at:]
    elif kind == "add":
        out += rng.bytes(n)
    elif kind == "zero":
        out[at : at + n] = bytes(len(out[at : at + n]))
    elif kind == "put":
        out[at : at + n] = rng.bytes(len(out[at : at + n]))
    elif kind == "swap":
        other = int(rng.integers(len(data)))
        out[at : at + n] = data[other : other + n]
    else:
        del out[at : at + n]
    return bytes(out)


if __name__ == "__main__":
    sys.exit(app.run(main))

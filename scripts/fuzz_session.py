"""Damages a session file in many ways: each must be refused, or read as what was saved.

Run it with `python -m scripts.fuzz_session`; --n=10000 files with bytes changed, --n_forged=3000
whose digests were made anew: these must be refused where they contradict themselves, and where they
are another sound session a runtime must take them or refuse them. The session is of a small model
of its own, and every file is read in this process, whose peak memory is printed at the end.
"""

import contextlib
import json
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime, session
from kvrt.errors import BadSession, KvrtError
from kvrt.session import codec
from kvrt.session.kv_file import blobs
from scripts._lib import commands
from scripts.forged_sessions import MUTANTS, any_array, any_leaf, joined, parted
from scripts.toy_decoder import ToyDecoder

_N = flags.DEFINE_integer("n", 10_000, "Mutated files.", lower_bound=1)
_N_FORGED = flags.DEFINE_integer("n_forged", 3000, "Files with digests that hold.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the mutations.")

KINDS = ("flip", "head", "cut", "add", "zero", "put", "swap", "drop")
_N_HEAD = 1100  # bytes of the first page that say something


def main() -> int:
    rng = np.random.default_rng(_SEED.value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.kv"
        runtime = open_runtime()
        taken = runtime.snapshot()
        session.save(path, taken)
        damaged, contradictory, other = (Reading(path, digests(taken)) for _ in range(3))
        data = path.read_bytes()
        for _ in range(_N.value):
            changed = data
            for _ in range(int(rng.integers(1, 4))):
                changed = mutated(changed, rng)
            damaged.read(changed)
        kinds = list(MUTANTS.values())
        for i in range(_N_FORGED.value):
            found = parted(data)
            if i % 3 == 0:
                kinds[i // 3 % len(kinds)](found, rng)
                contradictory.read(joined(found))
            else:
                (any_leaf if i % 3 == 1 else any_array)(found, rng)
                _restore(runtime, other.read(joined(found)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    all_of = {"bytes": damaged, "contradictions": contradictory, "any values": other}
    print(json.dumps({k: x.counts for k, x in all_of.items()} | {"peak_mb": peak // 1024}))
    # A contradiction that says the same as before is one that nobody has looked for.
    wrong = damaged.counts["other"] + contradictory.counts["other"] + contradictory.counts["same"]
    return 1 if wrong else 0


class Reading:
    """Reads files, and counts what came of it."""

    def __init__(self, path: Path, expected: list[str]):
        """Takes where files are written, and what the sound one holds."""
        self.path, self.expected = path, expected
        self.counts: Counter[str] = Counter()

    def read(self, data: bytes) -> session.Snapshot | None:
        """Reads a file; None if it was refused."""
        self.path.write_bytes(data)
        start, found = time.perf_counter(), None
        try:
            found = session.read(self.path)
            self.counts["same" if digests(found) == self.expected else "other"] += 1
        except BadSession:
            self.counts["refused"] += 1
        took = round(1000 * (time.perf_counter() - start))
        self.counts["slowest_ms"] = max(self.counts["slowest_ms"], took)
        return found


def _restore(runtime: Runtime, found: session.Snapshot | None) -> None:
    """Resumes a session of other values; raises what is no refusal."""
    if found is None:
        return
    with contextlib.suppress(KvrtError):
        runtime.restore(found)
        runtime.append([1])


def sound_session() -> session.Snapshot:
    """Three hundred tokens of a small model."""
    return open_runtime().snapshot()


def open_runtime() -> Runtime:
    """A runtime that holds them."""
    runtime = Runtime(ToyDecoder(), CacheConfig(n_ctx=512, n_ubatch=64, type_k="f32", type_v="f32"))
    runtime.append(np.random.default_rng(1).integers(0, runtime.n_vocab, 300).tolist())
    return runtime


def digests(snapshot: session.Snapshot) -> list[str]:
    """What a snapshot holds, short enough to compare."""
    said = [str(snapshot.fingerprint), str([(g.n_cells, g.head, g.lost) for g in snapshot.groups])]
    return [*said, *(blobs.blob_digest(tensors)[1] for tensors in codec.to_tensors(snapshot))]


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
    commands.run(main)

"""Sessions of the default model: time to the first token with and without one, rates, bytes.

    python -m scripts.bench.session --rounds 2
    python -m scripts.bench.session --model toy --lengths 200 --n_background 200 --rounds 1

The disk's rate is that of the same bytes written and flushed, and read, by the fastest of several
plain ways in the same run; reading is from the page cache for both.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime, session
from scripts._lib import commands, measure, rounds, shapes

_LENGTHS = flags.DEFINE_list("lengths", ["2000", "4000", "8000"], "Tokens of a session.")
_N_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each side.", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", "", "Where sessions are written; a temporary folder.")

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known model; toy is one of random weights.")
_N_BACKGROUND = flags.DEFINE_integer("n_background", 2000, "Tokens saved while decoding.", 2)

_N_STEPS = 60
_PIECE = 1 << 24


def main() -> None:
    lengths = [int(n) for n in _LENGTHS.value]
    decoder = shapes.decoder(_MODEL.value)
    for kv_dtype in ("f32", "f16"):
        config = CacheConfig(n_ctx=8192, type_k=kv_dtype, type_v=kv_dtype)
        runtime = Runtime(decoder, config)
        with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as folder:
            for n in lengths if kv_dtype == "f32" else lengths[:1]:
                one_length(runtime, n, Path(folder))
            background(runtime, Path(folder))


def one_length(runtime: Runtime, n: int, folder: Path) -> None:
    """First tokens, rates and bytes of a session of n tokens."""
    path = folder / f"{n}.kv"
    tokens = np.random.default_rng(n).integers(0, runtime.n_vocab, n).tolist()
    taken = warm(runtime, tokens, path)
    cold, warm_s, saves, reads = [], [], [], []
    disk_w, disk_r = [], []
    for _ in range(_N_ROUNDS.value):
        runtime.clear()
        cold += measure.clock(lambda: first_token(runtime, tokens), 1)
        runtime.seq_rm(0, n)
        taken = runtime.snapshot()
        jax.block_until_ready([(b.k, b.v) for g in taken.groups for b in g.blocks])
        path.unlink(missing_ok=True)
        saves += measure.clock(lambda t=taken: session.save(path, t), 1)
        reads += measure.clock(lambda: session.read(path), 1)
        w, r = disk(path)
        disk_w, disk_r = [*disk_w, w], [*disk_r, r]
        runtime.clear()
        warm_s += measure.clock(lambda: resumed_token(runtime, path, tokens), 1)
    n_bytes = path.stat().st_size
    held = [(b.k, b.v) for g in taken.groups for b in g.blocks]
    kv_bytes = sum(x.nbytes for x in jax.tree.leaves(held))
    save, read = (float(np.median(x)) for x in (saves, reads))
    measure.emit(
        "session",
        n_tokens=n,
        kv_dtype=runtime.config.type_k,
        prefill_s=measure.quartiles(cold, scale=1),
        restored_s=measure.quartiles(warm_s, scale=1, digits=3),
        speedup=round(float(np.median(cold) / np.median(warm_s)), 1),
        save_mb_s=round(n_bytes / save / 1e6),
        read_mb_s=round(n_bytes / read / 1e6),
        save_of_disk=round(float(np.median(disk_w)) / save, 2),
        read_of_disk=round(float(np.median(disk_r)) / read, 2),
        bytes_a_token=round(n_bytes / n, 1),
        of_arithmetic=round(n_bytes / kv_bytes, 4),
    )


def warm(runtime: Runtime, tokens: list[int], path: Path) -> session.Snapshot:
    """Compiles all that is timed; a snapshot of the tokens."""
    runtime.clear()
    first_token(runtime, tokens)
    runtime.seq_rm(0, len(tokens))
    taken = runtime.snapshot()
    session.save(path, taken)
    runtime.clear()
    resumed_token(runtime, path, tokens)
    return taken


def first_token(runtime: Runtime, tokens: list[int]) -> int:
    """Evaluates a prompt and samples."""
    runtime.prefill(tokens)
    return next(runtime.generate(1)).id


def resumed_token(runtime: Runtime, path: Path, tokens: list[int]) -> int:
    """Restores all but the last token, evaluates that one and samples."""
    runtime.restore(session.read(path))
    runtime.seq_rm(0, len(tokens) - 1)
    return first_token(runtime, tokens[-1:])


def disk(path: Path) -> tuple[float, float]:
    """Seconds to write and flush, and to read, the bytes of a file: by the fastest plain way.

    Ways to write: pieces of 16 MB, one call, and two threads that each write a half of a file of
    the final size. Ways to read: into new memory, and into memory that was touched before.
    """
    data, other = memoryview(path.read_bytes()), path.with_suffix(".bin")
    written = min(_written(other, ways) for ways in (_in_pieces(data), [(0, data)], _halves(data)))
    touched = bytearray(data)
    with other.open("rb", buffering=0) as file:
        reads = measure.clock(lambda: other.read_bytes(), 1)
        reads += measure.clock(lambda: file.readinto(touched), 1)
    other.unlink()
    return written, min(reads)


def _in_pieces(data: memoryview) -> list[tuple[int, memoryview]]:
    return [(at, data[at : at + _PIECE]) for at in range(0, len(data), _PIECE)]


def _halves(data: memoryview) -> list[tuple[int, memoryview]]:
    half = len(data) // 2
    return [(0, data[:half]), (half, data[half:])]


def _written(path: Path, pieces: list[tuple[int, memoryview]]) -> float:
    """Seconds until the pieces of a new file are on the disk; two are written side by side."""
    path.unlink(missing_ok=True)
    os.sync()  # what others have written is not waited for
    start = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    if len(pieces) == 2:
        os.ftruncate(fd, sum(len(data) for _, data in pieces))

    def put(piece: tuple[int, memoryview]) -> None:
        at, data = piece
        while data:
            n = os.pwrite(fd, data, at)
            at, data = at + n, data[n:]

    with ThreadPoolExecutor(2 if len(pieces) == 2 else 1) as threads:
        list(threads.map(put, pieces))
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - start


def background(runtime: Runtime, folder: Path) -> None:
    """Decode steps while a session is written again and again, and without."""
    path, n = folder / "background.kv", _N_BACKGROUND.value
    measure.fill(runtime, n)

    def steps(saves: bool) -> list[float]:
        runtime.seq_rm(0, n - 1)
        runtime.append([5])
        path.unlink(missing_ok=True)
        job = session.start_save(path, runtime.snapshot()) if saves else None
        seconds = sum(measure.steps(runtime, _N_STEPS))
        if job:
            job.result()
        return [seconds / _N_STEPS]

    sides = {"alone": lambda: steps(False), "saving": lambda: steps(True)}
    times = rounds.interleaved(sides, _N_ROUNDS.value, n_warm=0)
    measure.emit(
        "background save",
        kv_dtype=runtime.config.type_k,
        n_steps=_N_STEPS,
        alone_ms=round(times.median("alone") * 1e3, 2),
        saving_ms=round(times.median("saving") * 1e3, 2),
        slowdown=times.over("saving", "alone"),
    )


if __name__ == "__main__":
    commands.run(main)

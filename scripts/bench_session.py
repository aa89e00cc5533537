"""Sessions of the default model: time to the first token with and without one, rates, bytes.

Run it with `python scripts/bench_session.py`; --lengths=2000,4000,8000. The disk's rate is that of
the same bytes written and flushed, and read, by plain calls of the system in the same run; reading
is from the page cache for both.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import measure
import numpy as np
from absl import app, flags

from kvrt import CacheConfig, Runtime, session
from kvrt_models.load import load

_LENGTHS = flags.DEFINE_list("lengths", ["2000", "4000", "8000"], "Tokens of a session.")
_N_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each side.", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", "", "Where sessions are written; a temporary folder.")

_MODEL = "smollm2-135m"
_N_STEPS = 60


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    lengths = [int(n) for n in _LENGTHS.value]
    decoder = load(_MODEL).decoder
    for row_type in ("f32", "f16"):
        config = CacheConfig(n_ctx=8192, type_k=row_type, type_v=row_type)
        runtime = Runtime(decoder, config)
        with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as folder:
            for n in lengths if row_type == "f32" else lengths[:1]:
                one_length(runtime, n, Path(folder))
            background(runtime, Path(folder))


def one_length(runtime: Runtime, n: int, folder: Path) -> None:
    """First tokens, rates and bytes of a session of n tokens."""
    path = folder / f"{n}.kv"
    tokens = np.random.default_rng(n).integers(100, 10000, n).tolist()
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
    rows = sum(x.nbytes for x in jax.tree.leaves(held))
    save, read = (float(np.median(x)) for x in (saves, reads))
    measure.emit(
        "session",
        n_tokens=n,
        row_type=runtime.config.type_k,
        prefill_s=measure.quartiles(cold, scale=1),
        restored_s=measure.quartiles(warm_s, scale=1, digits=3),
        speedup=round(float(np.median(cold) / np.median(warm_s)), 1),
        save_mb_s=round(n_bytes / save / 1e6),
        read_mb_s=round(n_bytes / read / 1e6),
        save_of_disk=round(float(np.median(disk_w)) / save, 2),
        read_of_disk=round(float(np.median(disk_r)) / read, 2),
        bytes_a_token=round(n_bytes / n, 1),
        of_arithmetic=round(n_bytes / rows, 4),
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
    """Evaluates a prompt and draws."""
    runtime.prefill(tokens)
    return next(runtime.generate(1)).id


def resumed_token(runtime: Runtime, path: Path, tokens: list[int]) -> int:
    """Restores all but the last token, evaluates that one and draws."""
    runtime.restore(session.read(path))
    runtime.seq_rm(0, len(tokens) - 1)
    return first_token(runtime, tokens[-1:])


def disk(path: Path) -> tuple[float, float]:
    """Seconds to write and flush, and to read, the bytes of a file."""
    data, other = path.read_bytes(), path.with_suffix(".bin")
    start = time.perf_counter()
    fd = os.open(other, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for at in range(0, len(data), 1 << 24):
        os.write(fd, data[at : at + (1 << 24)])
    os.fsync(fd)
    os.close(fd)
    written = time.perf_counter() - start
    start = time.perf_counter()
    other.read_bytes()
    read = time.perf_counter() - start
    other.unlink()
    return written, read


def background(runtime: Runtime, folder: Path) -> None:
    """Decode steps while a session of 2,000 tokens is written again and again, and without."""
    path, samples = folder / "background.kv", {"alone": [], "saving": []}
    measure.fill(runtime, 2000)
    for _ in range(_N_ROUNDS.value):
        for name, out in samples.items():
            runtime.seq_rm(0, 1999)
            runtime.append([5])
            path.unlink(missing_ok=True)
            job = session.start_save(path, runtime.snapshot()) if name == "saving" else None
            out.append(sum(measure.steps(runtime, _N_STEPS)))
            if job:
                job.result()
    alone, saving = (float(np.median(samples[k])) for k in ("alone", "saving"))
    measure.emit(
        "background save",
        row_type=runtime.config.type_k,
        n_steps=_N_STEPS,
        alone_ms=round(alone / _N_STEPS * 1e3, 2),
        saving_ms=round(saving / _N_STEPS * 1e3, 2),
        slowdown=round(saving / alone, 3),
    )


if __name__ == "__main__":
    app.run(main)

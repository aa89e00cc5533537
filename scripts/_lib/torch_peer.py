"""PyTorch as a peer on a GPU: its attention over a static cache, compiled, in a process of its own.

The benchmarks call it; nobody else has to have PyTorch. A static cache keeps all keys of a batch
in one array a layer, as long as the longest sequence may get, and hides the rest by a mask.
"""

import dataclasses
import importlib
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One measurement.

    Attributes:
      n_batch: sequences.
      n_new: tokens of each in the step.
      context: tokens of each in the cache.
      n_cells: cells of the static cache, at least context + n_new.
      n_heads: query heads.
      n_kv_heads: kv heads.
      head_dim: channels of a head.
      dtype: "float32", "bfloat16" or "float16".
      n_layers: at most so many layers with caches of their own follow each other.
      n_runs: samples.
    """

    n_batch: int
    n_new: int
    context: int
    n_cells: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: str
    n_layers: int
    n_runs: int


def attention(asked: Sequence[Asked], device: str = "cuda") -> list[dict[str, Any]]:
    """Seconds of each sample by layer, or why there are none, for each that was asked.

    A process of its own gives its memory back, so it comes before JAX takes what there is.
    """
    if not asked:
        return []
    if importlib.util.find_spec("torch") is None:
        return [{"skipped": "torch is not installed"}] * len(asked)
    told = {"device": device, "asked": [dataclasses.asdict(a) for a in asked]}
    command = [sys.executable, __file__]
    done = subprocess.run(command, input=json.dumps(told).encode(), capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _serve(device: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    torch: Any = importlib.import_module("torch")  # no dependency of this project
    if device == "cuda" and not torch.cuda.is_available():
        return [{"skipped": f"torch {torch.__version__} finds no GPU"}] * len(asked)
    return [_time(torch, device, Asked(**a)) for a in asked]


def _time(torch: Any, device: str, a: Asked) -> dict[str, Any]:
    try:
        return _samples(torch, device, a)
    except torch.OutOfMemoryError as error:
        return {"skipped": " ".join(str(error).split())[:200]}


def _samples(torch: Any, device: str, a: Asked) -> dict[str, Any]:
    start = time.perf_counter()
    run, n_layers = prepare(torch, device, a)
    wait = waiting(torch, device)
    for _ in range(4):  # compiles, and records a CUDA graph
        run()
    wait()
    compile_s, samples = time.perf_counter() - start, []
    for _ in range(a.n_runs):
        start = time.perf_counter()
        run()
        wait()
        samples.append((time.perf_counter() - start) / n_layers)
    found = {"samples": samples, "median_s": statistics.median(samples), "compile_s": compile_s}
    return found | {"n_layers": n_layers, "version": torch.__version__}


def waiting(torch: Any, device: str) -> Callable[[], Any]:
    """What waits for a device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def prepare(torch: Any, device: str, a: Asked) -> tuple[Callable[[], Any], int]:
    """Compiled attention over a static cache, and the layers that follow each other in it.

    Raises:
      torch.OutOfMemoryError: there is no room for one layer.
    """
    dtype = getattr(torch, a.dtype)
    size = (a.n_batch, a.n_kv_heads, a.n_cells, a.head_dim)
    n_layers = min(a.n_layers, _most(torch, device, 2 * math.prod(size) * dtype.itemsize))
    if not n_layers:
        raise torch.OutOfMemoryError(f"no room for one layer of {a.n_cells} x {a.n_batch} cells")
    draw = {"dtype": dtype, "device": device}
    q = torch.randn((a.n_batch, a.n_heads, a.n_new, a.head_dim), **draw)
    caches = [(torch.randn(size, **draw), torch.randn(size, **draw)) for _ in range(n_layers)]
    reach = a.context + torch.arange(a.n_new, device=device)
    mask = torch.arange(a.n_cells, device=device)[None] <= reach[:, None]

    def chain(q: Any) -> Any:
        for k, v in caches:
            q = q + torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=a.n_heads != a.n_kv_heads
            )
        return q

    # On a CPU there is no graph to record, and compiling wants a compiler of its own.
    program = torch.compile(chain, mode="reduce-overhead") if device == "cuda" else chain

    def run() -> Any:
        with torch.inference_mode():
            return program(q)

    return run, n_layers


def _most(torch: Any, device: str, layer_bytes: int) -> int:
    """Layers that there is memory for."""
    if device != "cuda":
        return 1
    return int(0.8 * torch.cuda.mem_get_info()[0]) // layer_bytes


if __name__ == "__main__":
    print(json.dumps(_serve(**json.load(sys.stdin))), flush=True)

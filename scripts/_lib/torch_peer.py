"""PyTorch and FlashInfer as peers on a GPU, in a process of its own; it starts no JAX.

The benches call `run`; nobody else has to have PyTorch. A static cache keeps all keys of a batch
in one array a layer, as long as the longest sequence may get, and hides the rest by a mask.
"""

import dataclasses
import gc
import importlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_PAGE = 16
_WORKSPACE_BYTES = 256 << 20
# Of the memory that is free.
_SHARE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One measurement.

    Attributes:
      side: "torch sdpa" and "torch step" over a static cache, "flashinfer" over pages.
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
      scale: of scores.
      cap: of scores, 0 for none.
      step: of a step, sizes of the model: n_layers, n_embd, n_ff, n_vocab, tied, weight_bytes.
    """

    side: str
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
    scale: float = 1.0
    cap: float = 0.0
    step: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def run(asked: Sequence[Asked], device: str = "cuda") -> list[dict[str, Any]]:
    """What each takes by layer or step, or why there is nothing: the fields of a `rounds.Timed`.

    A process of its own gives its memory back, so it comes before JAX takes what there is.
    """
    if not asked:
        return []
    if importlib.util.find_spec("torch") is None:
        return [{"figures": {"skipped": "torch is not installed"}}] * len(asked)
    told = {"device": device, "asked": [dataclasses.asdict(a) for a in asked]}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, input=json.dumps(told).encode(), stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        reason = f"its process ended with {done.returncode}"
        return [{"figures": {"skipped": reason}}] * len(asked)
    return json.loads(done.stdout.splitlines()[-1])


# --- in the other process -------------------------------------------------------------------------


class _Ready(NamedTuple):
    """What is timed, how many layers it is, the bytes of one, and notes."""

    run: Callable[[], Any]
    parts: int
    n_bytes: int
    notes: dict[str, Any]


def _serve(device: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    torch: Any = importlib.import_module("torch")  # no dependency of this project
    if device == "cuda" and not torch.cuda.is_available():
        reason = f"torch {torch.__version__} finds no GPU"
        return [{"figures": {"skipped": reason}}] * len(asked)
    return [_time(torch, device, Asked(**a)) for a in asked]


def _time(torch: Any, device: str, a: Asked) -> dict[str, Any]:
    try:
        return _samples(torch, device, a)
    # Whatever a compiler, a driver or a library says is this side's result.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        return {"figures": {"skipped": f"{type(error).__name__}: {reason}"}}
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _samples(torch: Any, device: str, a: Asked) -> dict[str, Any]:
    start, samples = time.perf_counter(), []
    makers = {"torch sdpa": _sdpa, "torch step": _step, "flashinfer": _flashinfer}
    with torch.inference_mode():
        ready = makers[a.side](torch, device, a)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(4):  # compiles, and records a CUDA graph
        ready.run()
    wait()
    compile_s = round(time.perf_counter() - start, 2)
    for _ in range(a.n_runs):
        start = time.perf_counter()
        ready.run()
        wait()
        samples.append((time.perf_counter() - start) / ready.parts)
    figures = {"torch": torch.__version__, "n_chained": ready.parts, "compile_s": compile_s}
    return {"samples": samples, "n_bytes": ready.n_bytes, "figures": {**figures, **ready.notes}}


def _read_bytes(torch: Any, a: Asked) -> int:
    """Bytes of the keys and values that a layer has to read."""
    width = a.n_kv_heads * a.head_dim * getattr(torch, a.dtype).itemsize
    return 2 * a.n_batch * a.context * width


def _most_layers(torch: Any, device: str, a: Asked, layer_bytes: int) -> int:
    """Layers that there is memory for.

    Raises:
      torch.OutOfMemoryError: for none.
    """
    if device != "cuda":
        return 1
    n = min(a.n_layers, int(_SHARE * torch.cuda.mem_get_info()[0]) // layer_bytes)
    if n < 1:
        raise torch.OutOfMemoryError(f"no room for one layer of {layer_bytes} bytes")
    return n


def _compiled(torch: Any, device: str, run: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    # On a CPU there is no graph to record, and compiling wants a compiler of its own.
    program = torch.compile(run, mode="reduce-overhead") if device == "cuda" else run

    def once() -> Any:
        with torch.inference_mode():
            return program(x)

    return once


def _sdpa(torch: Any, device: str, a: Asked) -> _Ready:
    """Attention over a static cache, compiled."""
    draw = {"dtype": getattr(torch, a.dtype), "device": device}
    size = (a.n_batch, a.n_kv_heads, a.n_cells, a.head_dim)
    n_layers = _most_layers(torch, device, a, 2 * math.prod(size) * draw["dtype"].itemsize)
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

    return _Ready(_compiled(torch, device, chain, q), n_layers, _read_bytes(torch, a), {})


def _flashinfer(torch: Any, device: str, a: Asked) -> _Ready:
    """FlashInfer over pages of 16 tokens, planned once, its layers in one CUDA graph.

    Source: docs.flashinfer.ai, `BatchDecodeWithPagedKVCacheWrapper` and its prefill.
    """
    n_seen = a.context + (a.n_new if a.n_new > 1 else 0)
    n_pages = -(-n_seen // _PAGE)
    draw = {"dtype": getattr(torch, a.dtype), "device": device}
    size = (a.n_batch * n_pages, 2, _PAGE, a.n_kv_heads, a.head_dim)
    space = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    n_layers = _most_layers(torch, device, a, math.prod(size) * draw["dtype"].itemsize)
    caches = [torch.randn(size, **draw) for _ in range(n_layers)]
    q = torch.randn((a.n_batch * a.n_new, a.n_heads, a.head_dim), **draw)

    def ints(values: Any) -> Any:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    first = ints(torch.arange(a.n_batch + 1) * n_pages)
    last = ints([(n_seen - 1) % _PAGE + 1] * a.n_batch)
    pages = (first, ints(torch.randperm(a.n_batch * n_pages)), last)
    flashinfer: Any = importlib.import_module("flashinfer")
    heads = (a.n_heads, a.n_kv_heads, a.head_dim, _PAGE)
    common = {"q_data_type": draw["dtype"], "kv_data_type": draw["dtype"]}
    common |= {"sm_scale": a.scale, "logits_soft_cap": a.cap}
    if a.n_new == 1:
        wide = a.n_heads // a.n_kv_heads >= 4
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=wide)
        wrapper.plan(*pages, *heads, **common)
    else:
        queries = ints(torch.arange(a.n_batch + 1) * a.n_new)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
        wrapper.plan(queries, *pages, *heads, causal=True, **common)

    def chain() -> Any:
        x = q
        for cache in caches:
            x = x + wrapper.run(x, cache)
        return x

    run, note = _recorded(torch, chain)
    notes = {"graph": note, "flashinfer": flashinfer.__version__}
    return _Ready(run, n_layers, _read_bytes(torch, a), notes)


def _recorded(torch: Any, chain: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """A CUDA graph of a function; where it cannot be recorded, the function, and why."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode():
            chain()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            chain()
    except RuntimeError as error:
        return chain, f"none: {str(error).splitlines()[0]}"
    return graph.replay, "recorded"


def _step(torch: Any, device: str, a: Asked) -> _Ready:
    """A llama decoder's step with random weights over a static cache, compiled."""
    n_bytes = a.step["weight_bytes"] + _read_bytes(torch, a) * a.step["n_layers"]
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
        if n_bytes > 0.9 * free:
            needed = n_bytes / (1 << 30)
            raise torch.OutOfMemoryError(f"needs {needed:.1f} GiB of {free / (1 << 30):.1f}")
    tokens = torch.zeros((a.n_batch, a.n_new), dtype=torch.int64, device=device)
    run = _compiled(torch, device, _Llama(torch, device, a), tokens)
    return _Ready(run, 1, n_bytes, {})


class _Llama:
    """What a step of a llama decoder costs: matrices, norms, RoPE, the cache written and read."""

    def __init__(self, torch: Any, device: str, a: Asked):
        """Draws weights and a cache; biases, post-norms and windows are left out."""
        self.torch, self.a, of = torch, a, a.step
        draw = {"dtype": getattr(torch, a.dtype), "device": device}

        def matrix(*size: int) -> Any:
            return torch.randn(size, **draw) * size[-1] ** -0.5

        width, n = of["n_embd"], a.n_heads * a.head_dim
        n_qkv = n + 2 * a.n_kv_heads * a.head_dim
        self.embedding = matrix(of["n_vocab"], width)
        self.head = self.embedding if of["tied"] else matrix(of["n_vocab"], width)
        sizes = ((n_qkv, width), (width, n), (2 * of["n_ff"], width), (width, of["n_ff"]))
        self.layers = [[matrix(*size) for size in sizes] for _ in range(of["n_layers"])]
        size = (a.n_batch, a.n_kv_heads, a.n_cells, a.head_dim)
        self.caches = [[torch.zeros(size, **draw) for _ in range(2)] for _ in self.layers]
        if device == "cuda":  # else what is written may not be part of a CUDA graph
            for x in (x for cache in self.caches for x in cache):
                torch._dynamo.mark_static_address(x)
        self.at = a.context + torch.arange(a.n_new, device=device)
        cells = torch.arange(a.n_cells, device=device)
        self.mask = cells[None] <= self.at[:, None]
        angle = self.at[:, None] * 10_000 ** -torch.linspace(0, 1, a.head_dim // 2, device=device)
        self.cos, self.sin = (f(angle).to(draw["dtype"]) for f in (torch.cos, torch.sin))

    def __call__(self, tokens: Any) -> Any:
        x = self.embedding[tokens]
        for weights, cache in zip(self.layers, self.caches, strict=True):
            x = self._layer(x, weights, cache)
        return self._normed(x[:, -1]) @ self.head.T

    def _layer(self, x: Any, weights: list[Any], cache: list[Any]) -> Any:
        torch, a = self.torch, self.a
        qkv, out, up, down = weights
        heads = (self._normed(x) @ qkv.T).unflatten(-1, (-1, a.head_dim)).transpose(1, 2)
        q, k, v = heads.split([a.n_heads, a.n_kv_heads, a.n_kv_heads], dim=1)
        cache[0].index_copy_(2, self.at, self._rotated(k))
        cache[1].index_copy_(2, self.at, v.contiguous())
        attend = torch.nn.functional.scaled_dot_product_attention
        shared = {"attn_mask": self.mask, "enable_gqa": a.n_heads != a.n_kv_heads}
        found = attend(self._rotated(q), cache[0], cache[1], **shared)
        x = x + found.transpose(1, 2).flatten(2) @ out.T
        gate, other = (self._normed(x) @ up.T).chunk(2, dim=-1)
        return x + (torch.nn.functional.silu(gate) * other) @ down.T

    def _rotated(self, x: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        parts = (a * self.cos - b * self.sin, a * self.sin + b * self.cos)
        return self.torch.cat(parts, dim=-1)

    def _normed(self, x: Any) -> Any:
        return self.torch.nn.functional.rms_norm(x, (x.shape[-1],))


if __name__ == "__main__":
    print(json.dumps(_serve(**json.load(sys.stdin))), flush=True)

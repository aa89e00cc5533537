"""The process that measures the peers in PyTorch; it starts no JAX. See `workers`."""

import gc
import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from scripts._lib import torch_peer
from scripts.gpu_day.workers import serve

_PAGE = 16
_WORKSPACE_BYTES = 256 << 20


class Ready(NamedTuple):
    """What is timed, and how many layers it is."""

    run: Callable[[], Any]
    parts: int


class Bench:
    """What is open, in PyTorch."""

    def __init__(self) -> None:
        """Nothing yet; `hello` comes first."""
        self.open: dict[str, Ready] = {}

    def hello(self, message: dict[str, Any]) -> dict[str, Any]:
        """Versions, and the device."""
        self.torch: Any = importlib.import_module("torch")  # no dependency of this project
        self.device = "cpu" if message["smoke"] else "cuda"
        if self.device == "cuda" and not self.torch.cuda.is_available():
            raise RuntimeError(f"torch {self.torch.__version__} finds no GPU")
        self.wait = torch_peer.waiting(self.torch, self.device)
        found = {"torch": self.torch.__version__}
        if importlib.util.find_spec("flashinfer"):
            found["flashinfer"] = importlib.import_module("flashinfer").__version__
        return found

    def prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        """Opens a side of a cell: compiles it and runs it a few times."""
        makers = {
            "torch sdpa": self._sdpa,
            "torch step": self._step,
            "flashinfer": self._flashinfer,
        }
        start = time.perf_counter()
        with self.torch.inference_mode():
            ready, n_bytes, notes = makers[message["side"]](message)
        for _ in range(4):  # compiles, and records a CUDA graph
            ready.run()
        self.wait()
        self.open[message["side"]] = ready
        seconds = round(time.perf_counter() - start, 1)
        return {"open_s": seconds, "n_bytes": n_bytes, "n_layers": ready.parts, **notes}

    def sample(self, message: dict[str, Any]) -> list[float]:
        """Seconds of some runs of an open side, for a layer or a step."""
        ready, found = self.open[message["side"]], []
        end = time.perf_counter() + message["most_s"]
        while len(found) < message["n"] and (not found or time.perf_counter() < end):
            start = time.perf_counter()
            ready.run()
            self.wait()
            found.append((time.perf_counter() - start) / ready.parts)
        return found

    def close(self, message: dict[str, Any]) -> None:
        """Forgets what is open, and gives its memory back."""
        self.open.clear()
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def _sdpa(self, message: dict[str, Any]) -> tuple[Ready, int, dict]:
        """Attention over a static cache, compiled."""
        a = torch_peer.Asked(**message["asked"])
        run, n_layers = torch_peer.prepare(self.torch, self.device, a)
        return Ready(run, n_layers), _read_bytes(self.torch, a), {}

    def _flashinfer(self, message: dict[str, Any]) -> tuple[Ready, int, dict]:
        """FlashInfer over pages of 16 tokens, planned once, its layers in one CUDA graph."""
        torch, a = self.torch, torch_peer.Asked(**message["asked"])
        n_seen = a.context + (a.n_new if a.n_new > 1 else 0)
        n_pages = -(-n_seen // _PAGE)
        draw = {"dtype": getattr(torch, a.dtype), "device": self.device}
        size = (a.n_batch * n_pages, 2, _PAGE, a.n_kv_heads, a.head_dim)
        layer_bytes = math.prod(size) * draw["dtype"].itemsize
        free = int(0.8 * torch.cuda.mem_get_info()[0]) - _WORKSPACE_BYTES
        n_layers = min(a.n_layers, free // layer_bytes)
        if n_layers < 1:
            raise torch.OutOfMemoryError(f"no room for one layer of {layer_bytes} bytes")
        caches = [torch.randn(size, **draw) for _ in range(n_layers)]
        q = torch.randn((a.n_batch * a.n_new, a.n_heads, a.head_dim), **draw)
        space = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

        def ints(values: Any) -> Any:
            return torch.as_tensor(values, dtype=torch.int32, device=self.device)

        pages = ints(torch.randperm(a.n_batch * n_pages))
        first = ints(torch.arange(a.n_batch + 1) * n_pages)
        last = ints([(n_seen - 1) % _PAGE + 1] * a.n_batch)
        queries = ints(torch.arange(a.n_batch + 1) * a.n_new)
        wrapper = _planned(a, space, (queries, first, pages, last), message)

        def chain() -> Any:
            x = q
            for cache in caches:
                x = x + wrapper.run(x, cache)
            return x

        run, note = _recorded(torch, chain)
        return Ready(run, n_layers), _read_bytes(torch, a), {"graph": note}

    def _step(self, message: dict[str, Any]) -> tuple[Ready, int, dict]:
        """A llama decoder's step with random weights over a static cache, compiled."""
        torch, a, of = self.torch, torch_peer.Asked(**message["asked"]), message["step"]
        if self.device == "cuda":
            cache_bytes = _read_bytes(torch, a) * of["n_layers"]
            needed = (message["weight_bytes"] + cache_bytes) / (1 << 30)
            free = torch.cuda.mem_get_info()[0] / (1 << 30)
            if needed > 0.9 * free:
                raise torch.OutOfMemoryError(f"needs {needed:.1f} GiB of {free:.1f} that are free")
        step = _Llama(torch, self.device, a, of)
        run = torch.compile(step, mode="reduce-overhead") if self.device == "cuda" else step
        tokens = torch.zeros((a.n_batch, a.n_new), dtype=torch.int64, device=self.device)

        def once() -> Any:
            with torch.inference_mode():
                return run(tokens)

        n_bytes = message["weight_bytes"] + _read_bytes(torch, a) * of["n_layers"]
        return Ready(once, 1), n_bytes, {}


def _read_bytes(torch: Any, a: torch_peer.Asked) -> int:
    """Bytes of the keys and values that a layer has to read."""
    width = a.n_kv_heads * a.head_dim * getattr(torch, a.dtype).itemsize
    return 2 * a.n_batch * a.context * width


def _planned(a: torch_peer.Asked, space: Any, lists: tuple, message: dict[str, Any]) -> Any:
    """FlashInfer's wrapper for a step over pages: lists of queries, of pages, and the last's size.

    Source: docs.flashinfer.ai, `BatchDecodeWithPagedKVCacheWrapper` and its prefill.
    """
    flashinfer: Any = importlib.import_module("flashinfer")
    torch: Any = importlib.import_module("torch")
    queries, *pages = lists
    heads = (a.n_heads, a.n_kv_heads, a.head_dim, _PAGE)
    dtype = getattr(torch, a.dtype)
    common = {"q_data_type": dtype, "kv_data_type": dtype}
    common |= {"sm_scale": message["scale"], "logits_soft_cap": message["cap"]}
    if a.n_new == 1:
        wide = a.n_heads // a.n_kv_heads >= 4
        found = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=wide)
        found.plan(*pages, *heads, **common)
    else:
        found = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
        found.plan(queries, *pages, *heads, causal=True, **common)
    return found


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


class _Llama:
    """What a step of a llama decoder costs: matrices, norms, RoPE, the cache written and read."""

    def __init__(self, torch: Any, device: str, a: torch_peer.Asked, of: dict[str, Any]):
        """Draws weights and a cache; biases, post-norms and windows are left out."""
        self.torch, self.a = torch, a
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
        found = torch.nn.functional.scaled_dot_product_attention(
            self._rotated(q),
            cache[0],
            cache[1],
            attn_mask=self.mask,
            enable_gqa=a.n_heads != a.n_kv_heads,
        )
        x = x + found.transpose(1, 2).flatten(2) @ out.T
        gate, other = (self._normed(x) @ up.T).chunk(2, dim=-1)
        return x + (torch.nn.functional.silu(gate) * other) @ down.T

    def _rotated(self, x: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        parts = (a * self.cos - b * self.sin, a * self.sin + b * self.cos)
        return self.torch.cat(parts, dim=-1)

    def _normed(self, x: Any) -> Any:
        return self.torch.nn.functional.rms_norm(x, (x.shape[-1],))


def main() -> None:
    bench = Bench()
    serve({name: getattr(bench, name) for name in ("hello", "prepare", "sample", "close")})


if __name__ == "__main__":
    main()

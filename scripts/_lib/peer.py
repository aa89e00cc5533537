"""llama.cpp as a peer for benchmarks, timed in a process of its own."""

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import numpy as np

from kvrt_models import hub

_TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


# A prompt as token ids, and how many tokens to generate.
Prompt = tuple[list[int], int]
# Tokens of a prompt that warm it up.
_N_WARM = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How llama.cpp runs a model.

    Attributes:
      path: the model's file.
      n_threads: of both prefill and decode.
      flash: flash attention instead of products of whole matrices; a quantized cache needs it.
      cache: type of keys and values, as ggml calls it.
      n_ctx: cells of all slots.
      n_slots: requests that are served together.
    """

    path: Path
    n_threads: int
    flash: bool
    cache: str = "f32"
    n_ctx: int = 1024
    n_slots: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """What llama.cpp says of one request, in seconds: the whole prompt, and one decode step."""

    prefill_s: float
    decode_s: float


def model_file(name: str, dtype: str) -> Path:
    """The model with its matrices as `dtype`, written once; "file" is the fetched one as it is."""
    source = Path(hub.resolve(name))
    if dtype == "file":
        return source
    path = hub.cache_dir() / "peer" / f"{source.stem}-{dtype}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        _write(source, part, dtype)
        part.rename(path)
    return path


def _write(source: Path, path: Path, dtype: str) -> None:
    reader = gguf.GGUFReader(source)
    kind, file_type = _TYPES[dtype]
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        x = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if x.ndim == 1:
            writer.add_tensor(tensor.name, x)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def time(setting: Setting, requests: Sequence[Prompt]) -> list[Timings]:
    """Times prompts and their greedy continuations, in a process that lives no longer.

    A llama.cpp that stays alive in this process keeps threads awake and slows both sides down.
    """
    return [Timings(**timings) for timings in _in_a_process(setting, requests)]


def together(setting: Setting, requests: Sequence[Prompt]) -> float:
    """Seconds until all of as many requests as there are slots, sent at once, have been answered.

    The same requests run once before, and are not timed.
    """
    assert len(requests) == setting.n_slots > 1
    return _in_a_process(setting, requests)


def _in_a_process(setting: Setting, requests: Sequence[Prompt]) -> Any:
    asked = dataclasses.asdict(setting) | {"path": str(setting.path), "requests": list(requests)}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, input=json.dumps(asked).encode(), capture_output=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _serve(requests: list[Prompt], n_slots: int, **setting: Any) -> Any:
    """Timings of each request, or the seconds of all where there are slots for them."""
    server = _server(n_slots=n_slots, **setting)
    if n_slots == 1:
        _complete(server, requests[0][0][:_N_WARM], 8)
        return [_complete(server, *request) for request in requests]
    return [_all_at_once(server, requests) for _ in range(2)][1]


def _all_at_once(server: Any, requests: list[Prompt]) -> float:
    start = perf_counter()
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(lambda request: _complete(server, *request), requests))
    return perf_counter() - start


def _server(*, path: str, n_threads: int, flash: bool, cache: str, n_ctx: int, n_slots: int) -> Any:
    xllamacpp: Any = importlib.import_module("xllamacpp")  # compiled, without types
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = n_ctx, n_ctx, 512, n_slots
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.cache_type_k = params.cache_type_v = kind
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = (
        kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.n_gpu_layers, params.cache_ram_mib, params.verbosity = 0, 0, 1
    params.fit_params = params.ui = False
    return xllamacpp.Server(params)


def _complete(server: Any, prompt: list[int], n_predict: int) -> dict[str, float]:
    answer = server.handle_completions(
        {
            "prompt": prompt,
            "max_tokens": n_predict,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "timings_per_token": True,
        }
    )
    if "timings" not in answer:
        raise RuntimeError(f"llama.cpp gave no timings: {answer}")
    timings = answer["timings"]
    prefill_s, decode_s = timings["prompt_ms"] / 1e3, timings["predicted_per_token_ms"] / 1e3
    return {"prefill_s": prefill_s, "decode_s": decode_s}


if __name__ == "__main__":
    print(json.dumps(_serve(**json.load(sys.stdin))), flush=True)

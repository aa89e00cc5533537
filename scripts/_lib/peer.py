"""llama.cpp as a peer for benchmarks, timed in a process of its own."""

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvrt_models import hub

_TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """What llama.cpp says of one request, in seconds: the whole prompt, and one decode step."""

    prefill_s: float
    decode_s: float


def model_file(name: str, dtype: str) -> Path:
    """The model with its matrices as `dtype`, written once beside the fetched one."""
    source = Path(hub.resolve(name))
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


def time(
    path: Path,
    requests: Sequence[tuple[Sequence[int], int]],
    *,
    n_threads: int,
    flash: bool,
) -> list[Timings]:
    """Times prompts and their greedy continuations, in a process that lives no longer.

    A llama.cpp that stays alive in this process keeps threads awake and slows both sides down.

    Args:
      path: the model's file.
      requests: token ids of a prompt, and how many tokens to generate.
      n_threads: of both prefill and decode.
      flash: llama.cpp's flash attention instead of its products of whole matrices.
    """
    asked = {"path": str(path), "n_threads": n_threads, "flash": flash, "requests": list(requests)}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, input=json.dumps(asked).encode(), capture_output=True, check=True
    )
    return [Timings(**timings) for timings in json.loads(done.stdout.splitlines()[-1])]


def _serve(path: str, n_threads: int, flash: bool, requests: list) -> list[dict[str, float]]:
    """One slot, float32 cache; a first request warms it up."""
    xllamacpp: Any = importlib.import_module("xllamacpp")  # compiled, without types
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = 1024, 1024, 512, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = (
        kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.n_gpu_layers, params.cache_ram_mib, params.verbosity = 0, 0, 1
    params.fit_params = params.ui = False
    server = xllamacpp.Server(params)
    return [_complete(server, *request) for request in [requests[0], *requests]][1:]


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

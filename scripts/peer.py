"""llama.cpp as a peer for benchmarks: the default model in a given type, timed in this process."""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models import hub

xllamacpp: Any = importlib.import_module("xllamacpp")  # compiled, without types

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


class LlamaCpp:
    """A live llama.cpp: one slot, float32 cache, no flash attention, as many threads as asked."""

    def __init__(self, path: Path, *, n_ctx: int, n_threads: int):
        """Loads the file and warms it up."""
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = n_ctx, 2048, 512, 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
        params.n_gpu_layers, params.cache_ram_mib, params.verbosity = 0, 0, 1
        params.fit_params = params.ui = False
        self._server = xllamacpp.Server(params)

    def time(self, prompt: Sequence[int], n_predict: int) -> Timings:
        """Evaluates a prompt and continues it greedily, with llama.cpp's own clock."""
        answer: dict[str, Any] = self._server.handle_completions(
            {
                "prompt": [int(t) for t in prompt],
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
        return Timings(
            prefill_s=timings["prompt_ms"] / 1e3,
            decode_s=timings["predicted_per_token_ms"] / 1e3,
        )

"""From a file, a folder or a known name to a decoder with its tokenizer."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvrt.arrays import Array
from kvrt.config import ROW_DTYPES, RowType
from kvrt.errors import BadModelFile, UnsupportedModel
from models import gguf, hub, safetensors, spec, tokenizer
from models.decoder import Decoder

# GGUF names of a block's tensors and what Hugging Face calls them.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder ready for `kvrt.Runtime`, with the tokenizer that belongs to it."""

    name: str
    spec: spec.DecoderSpec
    decoder: Decoder
    tokenizer: tokenizer.Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A model whose weights are still being read; `shapes` is its decoder with shapes for arrays.

    A `kvrt.Runtime` made of `shapes` can compile meanwhile, and then `bind` the decoder.
    """

    name: str
    spec: spec.DecoderSpec
    shapes: Decoder
    tokenizer: tokenizer.Tokenizer
    _weights: Mapping[str, Future[Array]]

    def wait(self) -> Model:
        """The model, once its weights are there.

        Raises:
          BadModelFile: a tensor is damaged.
        """
        weights = {name: future.result() for name, future in self._weights.items()}
        decoder = Decoder(self.spec, weights)
        return Model(name=self.name, spec=self.spec, decoder=decoder, tokenizer=self.tokenizer)


def load(name_or_path: str | Path, *, dtype: RowType = "f32", progress: bool = True) -> Model:
    """Loads a model; see `open_model`."""
    return open_model(name_or_path, dtype=dtype, progress=progress).wait()


def open_model(
    name_or_path: str | Path, *, dtype: RowType = "f32", progress: bool = True
) -> Opened:
    """Reads a model's description, and starts to read its weights.

    Args:
      name_or_path: a `.gguf` file, a folder with Hugging Face safetensors, or a known name, which
        is fetched once.
      dtype: of the matrices; norms and biases stay float32.
      progress: shows a bar on a terminal while fetching.

    Raises:
      BadModelFile: a file is damaged or incomplete.
      UnsupportedModel: an architecture, tensor type or tokenizer that kvrt does not know.
      FetchError: a known name could not be fetched.
    """
    path = hub.resolve(name_or_path, progress=progress)
    return _load_folder(path, dtype) if path.is_dir() else _load_gguf(path, dtype)


def tensor_names(of: spec.DecoderSpec) -> list[str]:
    """GGUF names of all tensors a model of this spec must have."""
    kinds = [k for k in _BLOCK_NAMES if of.qk_norm or not k.endswith(("q_norm", "k_norm"))]
    names = [f"blk.{i}.{kind}.weight" for i in range(of.n_layers) for kind in kinds]
    biased = ["attn_q", "attn_k", "attn_v"] if of.qkv_bias else []
    biased += ["attn_output"] if of.out_bias else []
    biased += ["ffn_gate", "ffn_up", "ffn_down"] if of.ffn_bias else []
    names += [f"blk.{i}.{kind}.bias" for i in range(of.n_layers) for kind in biased]
    return [*names, *(t for t in _TOP_NAMES if not (of.tied and t == "output.weight"))]


def tensor_shape(of: spec.DecoderSpec, name: str) -> tuple[int, ...]:
    """The shape that a tensor of this GGUF name must have."""
    if name in ("token_embd.weight", "output.weight"):
        return (of.n_vocab, of.n_embd)
    if name == "output_norm.weight":
        return (of.n_embd,)
    _, layer, kind, what = name.split(".")
    group = of.group_of(int(layer))
    d = group.head_dim
    q, kv = of.n_heads * d, group.n_kv_heads * d
    wide = {
        "attn_q": (q, of.n_embd),
        "attn_k": (kv, of.n_embd),
        "attn_v": (kv, of.n_embd),
        "attn_output": (of.n_embd, q),
        "ffn_gate": (of.n_ff, of.n_embd),
        "ffn_up": (of.n_ff, of.n_embd),
        "ffn_down": (of.n_embd, of.n_ff),
    }
    if kind in wide:
        return wide[kind] if what == "weight" else wide[kind][:1]
    return (d,) if kind in ("attn_q_norm", "attn_k_norm") else (of.n_embd,)


def _load_gguf(path: Path, dtype: RowType) -> Opened:
    file = gguf.open_gguf(path)
    with _told_of(path):
        described = spec.from_gguf(file.metadata, file.tensors)
        if "rope_freqs.weight" in file.tensors:
            factors = gguf.read_tensor(file, "rope_freqs.weight")
            described = spec.with_freq_factors(described, tuple(map(float, factors)))
        for name in tensor_names(described):
            if name in file.tensors:
                _check_shape(name, file.tensors[name].shape, tensor_shape(described, name))
    return _assemble(
        path.stem,
        described,
        lambda name: gguf.read_tensor(file, name),
        set(file.tensors),
        dtype,
        tokenizer.from_gguf(file.metadata),
    )


def _load_folder(path: Path, dtype: RowType) -> Opened:
    folder = safetensors.open_folder(path)
    with _told_of(path / "config.json"):
        described = spec.from_hf(folder.config)
    names = {_hf_name(name): name for name in tensor_names(described)}
    return _assemble(
        path.resolve().name,
        described,
        lambda name: safetensors.read_tensor(folder, _hf_name(name)),
        {names.get(name, name) for name in folder.tensors},
        dtype,
        tokenizer.from_folder(path),
    )


@contextlib.contextmanager
def _told_of(path: Path) -> Iterator[None]:
    """Puts the file's name in front of what its description did wrong."""
    try:
        yield
    except (BadModelFile, UnsupportedModel) as error:
        raise type(error)(f"{path}: {error}") from error


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, kind, what = name.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[kind]}.{what}"


def _assemble(
    name: str,
    described: spec.DecoderSpec,
    read: Callable[[str], np.ndarray],
    present: set[str],
    dtype: RowType,
    text: tokenizer.Tokenizer,
) -> Opened:
    names = tensor_names(described)
    _check_names(name, described, present)
    if text.n_vocab > described.n_vocab:
        raise BadModelFile(
            f"the tokenizer has {text.n_vocab} tokens, the embedding {described.n_vocab} "
            "rows; they belong to different models"
        )

    def tensor(t: str) -> Array:
        return _cast(t, read(t), tensor_shape(described, t), dtype)

    # Dequantisation is NumPy, which lets go of the interpreter: two threads halve the wait.
    pool = ThreadPoolExecutor(2)
    weights = {t: pool.submit(tensor, t) for t in names}
    pool.shutdown(wait=False)
    shapes = {t: _shape(tensor_shape(described, t), dtype) for t in names}
    return Opened(
        name=name,
        spec=described,
        shapes=Decoder(described, shapes),
        tokenizer=text,
        _weights=weights,
    )


def _check_names(name: str, described: spec.DecoderSpec, present: set[str]) -> None:
    names = tensor_names(described)
    missing = sorted(set(names) - present)
    if missing:
        raise BadModelFile(
            f"{name} lacks {len(missing)} of {len(names)} tensors, the first {missing[0]!r}; "
            "fetch the model again"
        )
    # A weight left out would give wrong text; old files keep frequencies, which follow from config.
    unknown = sorted(
        t
        for t in present - set(names)
        if t.startswith(("blk.", "model.layers.")) and not t.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise UnsupportedModel(
            f"{name} has {len(unknown)} tensors in its layers that no {described.arch} model here "
            f"uses, the first {unknown[0][:60]!r}; take an unmodified, unquantised model"
        )


def _shape(shape: tuple[int, ...], dtype: RowType) -> Any:
    """What stands for an array while a program is compiled."""
    return jax.ShapeDtypeStruct(shape, ROW_DTYPES[dtype if len(shape) == 2 else "f32"])


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise BadModelFile(f"tensor {name!r} has shape {found}, {wanted} wanted")


def _cast(name: str, x: np.ndarray, shape: tuple[int, ...], dtype: RowType) -> Array:
    _check_shape(name, x.shape, shape)
    if x.ndim == 2 and dtype != "f32":
        kinds = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
        x = x.astype(kinds[dtype])
    assert x.dtype == np.dtype(ROW_DTYPES[dtype]) or x.ndim == 1
    return jnp.asarray(x)

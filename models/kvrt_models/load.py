"""From a file, a folder or a known name to a decoder with its tokenizer."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvrt.arrays import AnyArray
from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt.kv_types import FLOAT_DTYPES, FloatType
from kvrt_models import hub
from kvrt_models.decoder import Decoder
from kvrt_models.gguf import file as gguf
from kvrt_models.gguf import spec as gguf_spec
from kvrt_models.hf import safetensors
from kvrt_models.hf import spec as hf_spec
from kvrt_models.hf.json_file import read_json
from kvrt_models.identity import identity
from kvrt_models.layers.tensors import (
    gguf_name,
    hf_names,
    hf_prefix,
    is_matrix,
    is_norm,
    tensor_from_hf,
    tensor_names,
    tensor_shape,
    weight_parts,
    weight_shape,
)
from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer import encode as tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder ready for `kvrt.Runtime`, with the tokenizer that belongs to it."""

    name: str
    spec: DecoderSpec
    decoder: Decoder
    tokenizer: tokenizer.Tokenizer

    @property
    def identity(self) -> dict[str, str]:
        """What identifies it beside its weights and sizes, for `kvrt.Runtime`."""
        return identity(self.spec, self.tokenizer.digest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A model whose weights are still being read; `shapes` is its decoder with shapes for arrays.

    A `kvrt.Runtime` made of `shapes` can compile meanwhile, and then `bind` the decoder.
    """

    name: str
    spec: DecoderSpec
    shapes: Decoder
    tokenizer: tokenizer.Tokenizer
    _weights: Mapping[str, Future[AnyArray]]

    @property
    def identity(self) -> dict[str, str]:
        """What identifies it beside its weights and sizes, for `kvrt.Runtime`."""
        return identity(self.spec, self.tokenizer.digest)

    def wait(self, progress: Callable[[int, int], None] | None = None) -> Model:
        """The model, once its weights are there.

        Args:
          progress: called with weights that are there, and how many there will be.

        Raises:
          BadModelFile: a tensor is damaged.
        """
        # NumPy's arrays stand for those of a device until they are bound to several.
        weights: Any = {}
        for name, future in self._weights.items():
            if progress:
                progress(len(weights), len(self._weights))
            weights[name] = future.result()
        decoder = Decoder(self.spec, weights)
        return Model(name=self.name, spec=self.spec, decoder=decoder, tokenizer=self.tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A model by its header alone.

    Attributes:
      name: of the file or folder.
      spec: its description.
      weights: shapes and types of the decoder's weights in memory, by name.
    """

    name: str
    spec: DecoderSpec
    weights: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def n_params(self) -> int:
        """Numbers in all weights."""
        return sum(x.size for x in self.weights.values())

    @property
    def n_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return sum(x.size * x.dtype.itemsize for x in self.weights.values())


def load(name_or_path: str | Path, *, dtype: FloatType = "f32", progress: bool = True) -> Model:
    """Loads a model; see `open_model`."""
    return open_model(name_or_path, dtype=dtype, progress=progress).wait()


def open_model(
    name_or_path: str | Path,
    *,
    dtype: FloatType = "f32",
    progress: bool = True,
    on_host: bool = False,
) -> Opened:
    """Reads a model's description, and starts to read its weights.

    Args:
      name_or_path: a `.gguf` file, a folder with Hugging Face safetensors, or a known name, which
        is fetched once.
      dtype: of the matrices; norms and biases stay float32.
      progress: shows a bar on a terminal while fetching.
      on_host: keeps the weights in NumPy, for a runtime that divides them over devices.

    Raises:
      BadModelFile: a file is damaged or incomplete.
      UnsupportedModel: an architecture, tensor type or tokenizer that kvrt does not know.
      FetchError: a known name could not be fetched.
    """
    path = hub.resolve(name_or_path, progress=progress)
    load = _load_folder if path.is_dir() else _load_gguf
    return load(path, dtype, on_host)


def open_tokenizer(name_or_path: str | Path, *, progress: bool = True) -> tokenizer.Tokenizer:
    """The tokenizer of a model alone; see `open_model`."""
    path = hub.resolve(name_or_path, progress=progress)
    if path.is_dir():
        return tokenizer.tokenizer_from_folder(path)
    return tokenizer.tokenizer_from_gguf(gguf.open_gguf(path).metadata)


def describe_model(
    name_or_path: str | Path, *, dtype: FloatType = "f32", progress: bool = True
) -> Described:
    """Reads a model's description; no weight is read.

    Args:
      name_or_path: as for `open_model`, or a config.json of Hugging Face without its weights.
      dtype: of the matrices.
      progress: shows a bar on a terminal while fetching.

    Raises:
      BadModelFile: a file is damaged or incomplete.
      UnsupportedModel: an architecture that kvrt does not know.
      FetchError: a known name could not be fetched.
    """
    path = hub.resolve(name_or_path, progress=progress)
    if path.is_dir():
        name, described = path.resolve().name, _folder_spec(path)[1]
    elif path.suffix == ".json":
        with _naming(path):
            described = hf_spec.spec_from_config(read_json(path))
        name = path.resolve().parent.name
    else:
        name, described = path.stem, _gguf_spec(path)[1]
    return Described(name=name, spec=described, weights=_weight_shapes(described, dtype))


def _gguf_spec(path: Path) -> tuple[gguf.GGUFFile, DecoderSpec, dict[str, list[str]]]:
    """The header, the model it describes, and the file's name of each tensor."""
    file = gguf.open_gguf(path)
    with _naming(path):
        described = gguf_spec.spec_from_gguf(file.metadata, file.tensors)
        if "rope_freqs.weight" in file.tensors:
            factors = gguf.read_gguf_tensor(file, "rope_freqs.weight")
            described = gguf_spec.with_freq_factors(described, tuple(map(float, factors)))
        names = {name: [gguf_name(described, name)] for name in tensor_names(described)}
        for name, (called,) in names.items():
            if called in file.tensors:
                _check_shape(called, file.tensors[called].shape, tensor_shape(described, name))
    _check_names(path.stem, described, _present(names, set(file.tensors)))
    return file, described, names


def _load_gguf(path: Path, dtype: FloatType, on_host: bool) -> Opened:
    file, described, names = _gguf_spec(path)
    return _assemble(
        path.stem,
        described,
        lambda name: gguf.read_gguf_tensor(file, names[name][0]),
        dtype,
        tokenizer.tokenizer_from_gguf(file.metadata),
        on_host,
    )


def _folder_spec(path: Path) -> tuple[safetensors.Folder, DecoderSpec, dict[str, list[str]]]:
    """The folder, the model it describes, and the files' names of each tensor."""
    folder = safetensors.open_hf_folder(path)
    with _naming(path / "config.json"):
        described = hf_spec.spec_from_config(folder.config)
    names = {name: hf_names(described, name) for name in tensor_names(described)}
    prefix = hf_prefix(described)
    present = {t.removeprefix(prefix) for t in _present(names, set(folder.tensors))}
    _check_names(path.resolve().name, described, present)
    return folder, described, names


def _load_folder(path: Path, dtype: FloatType, on_host: bool) -> Opened:
    folder, described, names = _folder_spec(path)
    less_one = described.arch in hf_spec.NORMS_LESS_ONE

    def read(name: str) -> np.ndarray:
        parts = [safetensors.read_folder_tensor(folder, part) for part in names[name]]
        x = tensor_from_hf(described, name, parts)
        return x + np.float32(1) if less_one and is_norm(name) else x

    text = tokenizer.tokenizer_from_folder(path)
    return _assemble(path.resolve().name, described, read, dtype, text, on_host)


def _present(names: Mapping[str, Sequence[str]], there: set[str]) -> set[str]:
    """The tensors of a file by the decoder's names, others by the file's own."""
    used = {part for parts in names.values() for part in parts}
    return {name for name, parts in names.items() if there >= set(parts)} | (there - used)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name in front of errors in its description."""
    try:
        yield
    except (BadModelFile, UnsupportedModel) as error:
        raise type(error)(f"{path}: {error}") from error


def _assemble(
    name: str,
    described: DecoderSpec,
    read: Callable[[str], np.ndarray],
    dtype: FloatType,
    text: tokenizer.Tokenizer,
    on_host: bool,
) -> Opened:
    if text.n_vocab > described.n_vocab:
        raise BadModelFile(
            f"the tokenizer has {text.n_vocab} tokens, the embedding {described.n_vocab} "
            "rows; they belong to different models"
        )

    def weight(tensors: tuple[str, ...]) -> AnyArray:
        parts = [_cast(t, read(t), tensor_shape(described, t), dtype) for t in tensors]
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found if on_host else jnp.asarray(found)

    # NumPy dequantizes, and releases the interpreter's lock meanwhile: two threads halve the wait.
    pool = ThreadPoolExecutor(2)
    parts = weight_parts(described)
    weights = {name: pool.submit(weight, tensors) for name, tensors in parts.items()}
    pool.shutdown(wait=False)
    # Shapes stand for arrays while a program is compiled.
    shapes: Any = _weight_shapes(described, dtype)
    return Opened(
        name=name,
        spec=described,
        shapes=Decoder(described, shapes),
        tokenizer=text,
        _weights=weights,
    )


def _check_names(name: str, described: DecoderSpec, present: set[str]) -> None:
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
            f"uses, the first {unknown[0][:60]!r}; take an unmodified, unquantized model"
        )


def _weight_shapes(described: DecoderSpec, dtype: FloatType) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the decoder's weights."""

    def shape(name: str, tensors: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        size = weight_shape(described, tensors)
        return jax.ShapeDtypeStruct(size, FLOAT_DTYPES[dtype if is_matrix(name, size) else "f32"])

    return {name: shape(name, tensors) for name, tensors in weight_parts(described).items()}


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise BadModelFile(f"tensor {name!r} has shape {found}, {wanted} wanted")


def _cast(name: str, x: np.ndarray, shape: tuple[int, ...], dtype: FloatType) -> np.ndarray:
    _check_shape(name, x.shape, shape)
    if is_matrix(name, shape) and dtype != "f32":
        kinds = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
        x = x.astype(kinds[dtype])
    assert x.dtype == np.dtype(FLOAT_DTYPES[dtype]) or not is_matrix(name, shape)
    return x

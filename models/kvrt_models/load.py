"""From a file, a folder or a known name to a decoder with its tokenizer."""

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import jax

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt.exclusive import start_jax
from kvrt_models import hub
from kvrt_models.decoder import Decoder
from kvrt_models.families.shared import registry
from kvrt_models.gguf import file as gguf
from kvrt_models.gguf.parts import model_name, open_gguf_model
from kvrt_models.hf import safetensors
from kvrt_models.hf.json_file import read_json
from kvrt_models.identity import identity
from kvrt_models.layers.linear import Matrix
from kvrt_models.layers.tensors import tensors_of, weight_parts, weight_shape
from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer import encode as tokenizer
from kvrt_models.weights import shapes
from kvrt_models.weights.int8_weights import Watch
from kvrt_models.weights.loading import Weights, read_weights
from kvrt_models.weights.source import WeightSource, check_shape, folder_source, gguf_source
from kvrt_models.weights.types import WeightChoice, WeightType, default_type

# What stands before the names of a layer's tensors.
_LAYERS = ("blk.", "layers.")
# Beginnings of names in Hugging Face's folders and what stands there instead where a part of a
# model was saved: the text part of one with pictures, as older and newer files call it, or all
# but the head.
_PARTS = (
    ("", ""),
    ("", "language_model."),
    ("model.", "model.language_model."),
    ("model.", ""),
)


# A model's name, its weights, and what reads its tokenizer.
_Files = tuple[str, WeightSource, Callable[[], tokenizer.Tokenizer]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder ready for `kvrt.Runtime`, with the tokenizer that belongs to it.

    Attributes:
      name: of the file or folder.
      spec: of the decoder.
      decoder: with its weights.
      tokenizer: of its texts.
      dtype: of its matrices.
    """

    name: str
    spec: DecoderSpec
    decoder: Decoder
    tokenizer: tokenizer.Tokenizer
    dtype: WeightType

    @property
    def identity(self) -> dict[str, str]:
        """What identifies it beside its weights and sizes, for `kvrt.Runtime`."""
        return identity(self.spec, self.tokenizer.digest, self.dtype, self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A model whose weights are still being read; `shapes` is its decoder with shapes for arrays.

    A `kvrt.Runtime` made of `shapes` can compile meanwhile, and then `bind` the decoder.
    """

    name: str
    spec: DecoderSpec
    shapes: Decoder
    tokenizer: tokenizer.Tokenizer
    weights: Weights

    @property
    def dtype(self) -> WeightType:
        """Of its matrices."""
        return self.weights.dtype

    @property
    def widened_bytes(self) -> int:
        """What a product of many tokens holds beside the weights for a while."""
        return shapes.widened_bytes(self.weights.shapes)

    @property
    def identity(self) -> dict[str, str]:
        """What identifies it beside its weights and sizes, for `kvrt.Runtime`."""
        return identity(self.spec, self.tokenizer.digest, self.dtype, self.name)

    def wait(self, progress: Callable[[int, int], None] | None = None) -> Model:
        """The model, once its weights are there.

        Args:
          progress: called with weights that are there, and how many there will be.

        Raises:
          BadModelFile: a tensor is damaged.
        """
        return Model(
            name=self.name,
            spec=self.spec,
            decoder=Decoder(self.spec, self.weights.wait(progress)),
            tokenizer=self.tokenizer,
            dtype=self.dtype,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A model by its header alone.

    Attributes:
      name: of the file or folder.
      spec: its description.
      dtype: of its matrices in memory.
      weights: shapes and types of the decoder's weights there, by name.
    """

    name: str
    spec: DecoderSpec
    dtype: WeightType
    weights: Mapping[str, Matrix]

    @property
    def n_params(self) -> int:
        """Numbers in all weights."""
        return sum(
            math.prod(weight_shape(self.spec, parts)) for parts in weight_parts(self.spec).values()
        )

    @property
    def n_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return shapes.n_bytes(self.weights)

    @property
    def widened_bytes(self) -> int:
        """What a product of many tokens holds beside them for a while."""
        return shapes.widened_bytes(self.weights)


def load(name_or_path: str | Path, *, dtype: WeightChoice = "auto", progress: bool = True) -> Model:
    """Loads a model as the command does, with int8 weights on CPU and bf16 on GPU and TPU.

    Args:
      name_or_path: a `.gguf` file, a folder with Hugging Face safetensors, or a known name, which
        is fetched once.
      dtype: of the matrices; "f32" computes with the numbers of the file.
      progress: shows a bar on a terminal while fetching.

    Raises:
      KvrtError: as `open_model`.
    """
    return open_model(name_or_path, dtype=dtype, progress=progress).wait()


def open_model(
    name_or_path: str | Path,
    *,
    dtype: WeightChoice = "auto",
    progress: bool = True,
    on_host: bool = False,
    watch: Watch | None = None,
) -> Opened:
    """Reads a model's description, and starts to read its weights.

    With dtype "int8" the first call quantizes the weights before it returns, and keeps them in the
    cache folder; see `kvrt_models.weights`.

    Args:
      name_or_path: a `.gguf` file or any part of one, a folder with Hugging Face safetensors, or a
        known name, which is fetched once.
      dtype: of the matrices, "auto" for that of the platform; norms and biases stay float32.
      progress: shows a bar on a terminal while fetching.
      on_host: keeps the weights in NumPy, for a runtime that divides them over devices.
      watch: is told how quantizing goes; without one a line is a warning of Python's.

    Raises:
      BadModelFile: a file is damaged or incomplete.
      UnsupportedModel: an architecture, tensor type or tokenizer that kvrt does not know.
      FetchError: a known name could not be fetched.
      UsageError: this process was forked from one where kvrt had started JAX.
    """
    start_jax("load")
    path = hub.resolve(name_or_path, progress=progress)
    name, source, read_tokenizer = _folder(path) if path.is_dir() else _gguf(path)
    text = read_tokenizer().for_embedding(source.spec.n_vocab)
    watch = watch or Watch(tell=lambda line: warnings.warn(line, stacklevel=3))
    for line in source.notes:
        watch.tell(f"{name}: {line}")
    weights = read_weights(source, name, chosen_type(dtype), on_host=on_host, watch=watch)
    # Shapes stand for arrays while a program is compiled.
    decoder = Decoder(source.spec, weights.shapes)
    return Opened(name=name, spec=source.spec, shapes=decoder, tokenizer=text, weights=weights)


def chosen_type(dtype: WeightChoice) -> WeightType:
    """The type that is meant on the devices there are."""
    return default_type(jax.default_backend()) if dtype == "auto" else dtype


def open_tokenizer(name_or_path: str | Path, *, progress: bool = True) -> tokenizer.Tokenizer:
    """The tokenizer of a model alone; see `open_model`."""
    path = hub.resolve(name_or_path, progress=progress)
    if path.is_dir():
        return tokenizer.tokenizer_from_folder(path)
    return tokenizer.tokenizer_from_gguf(open_gguf_model(path).metadata)


def describe_model(
    name_or_path: str | Path, *, dtype: WeightChoice = "auto", progress: bool = True
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
    path, blocks = hub.resolve(name_or_path, progress=progress), {}
    if path.suffix == ".json" and not path.is_dir():
        with _naming(path):
            described = registry.spec_from_config(read_json(path))
        name = path.resolve().parent.name
    else:
        name, source, _ = _folder(path) if path.is_dir() else _gguf(path)
        described, blocks = source.spec, source.blocks
    kind = chosen_type(dtype)
    weights = shapes.weight_shapes(described, kind, blocks=blocks)
    return Described(name=name, spec=described, dtype=kind, weights=weights)


def _gguf(path: Path) -> _Files:
    """A GGUF file, whose tokenizer is in its header."""
    file, name = open_gguf_model(path), model_name(path)
    with _naming(path):
        described = registry.spec_from_gguf(file.metadata, file.tensors)
        if "rope_freqs.weight" in file.tensors:
            factors = gguf.read_gguf_tensor(file, "rope_freqs.weight")
            described = registry.with_freq_factors(described, tuple(map(float, factors)))
        names, shapes = {}, {}
        for tensor, row in tensors_of(described).items():
            called, shape = row.gguf, row.shape
            if row.joined is not None and called not in file.tensors:
                called, shape = row.joined if row.joined[0] in file.tensors else (called, shape)
            names[tensor], shapes[called] = [called], shape
        file = dataclasses.replace(file, tensors=_fitted(file.tensors, shapes))
    _check_names(name, described, names, set(file.tensors))
    source = gguf_source(file, described, names)
    return name, source, lambda: tokenizer.tokenizer_from_gguf(file.metadata)


def _folder(path: Path) -> _Files:
    """A Hugging Face folder, whose tensors may be those of a part of a model."""
    folder, name = safetensors.open_hf_folder(path), path.resolve().name
    with _naming(path / "config.json"):
        described = registry.spec_from_config(folder.config)
    names, others = {}, registry.family_of(described.arch).other_names
    for tensor, row in tensors_of(described).items():
        other = [part.replace(*others) for part in row.hf]
        names[tensor] = other if other[0] in folder.tensors else row.hf
    names = _as_stored(names, folder.tensors)
    _check_names(name, described, names, set(folder.tensors))
    source = folder_source(folder, described, names)
    return name, source, lambda: tokenizer.tokenizer_from_folder(path)


def _fitted(
    tensors: Mapping[str, gguf.TensorInfo], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, gguf.TensorInfo]:
    """Tensors in the shapes that are wanted, from which theirs may differ by outer axes of 1.

    Raises:
      BadModelFile: one differs otherwise.
    """
    fitted = dict(tensors)
    for name, shape in wanted.items():
        if name in tensors:
            if _bare(tensors[name].shape) != _bare(shape):
                check_shape([name], tensors[name].shape, shape)
            fitted[name] = dataclasses.replace(tensors[name], shape=shape)
    return fitted


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without outer axes of 1."""
    return tuple(itertools.dropwhile(lambda size: size == 1, shape))


def _as_stored(names: Mapping[str, list[str]], there: Collection[str]) -> dict[str, list[str]]:
    """Names of a folder's tensors, which may be those of a part: a model without its head."""
    (embedding,) = names["token_embd.weight"]
    for before, after in _PARTS:
        if embedding.startswith(before) and after + embedding.removeprefix(before) in there:
            return {
                name: [
                    after + part.removeprefix(before) if part.startswith(before) else part
                    for part in parts
                ]
                for name, parts in names.items()
            }
    return dict(names)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name in front of errors in its description."""
    try:
        yield
    except (BadModelFile, UnsupportedModel) as error:
        raise type(error)(f"{path}: {error}") from error


def _check_names(
    title: str, described: DecoderSpec, names: Mapping[str, Sequence[str]], there: set[str]
) -> None:
    """Refuses a file without tensors of the model, or with others in its layers.

    Args:
      title: of the model, for messages.
      described: the model.
      names: what the file calls each tensor of the decoder.
      there: what it has.

    Raises:
      BadModelFile: tensors are missing.
      UnsupportedModel: the layers have others.
    """
    wanted = {part for parts in names.values() for part in parts}
    missing = sorted(wanted - there)
    if missing:
        like = f"; its own are called like {min(there)[:60]!r}" if there.isdisjoint(wanted) else ""
        raise BadModelFile(
            f"{title} lacks {len(missing)} of {len(wanted)} tensors, the first {missing[0]!r}"
            f"{like}; fetch the model again"
        )
    # A weight left out would give wrong text; old files keep frequencies, which follow from config.
    layers = {part[: part.find(x) + len(x)] for part in wanted for x in _LAYERS if x in part}
    unknown = sorted(
        t
        for t in there - wanted
        if t.startswith(tuple(layers)) and not t.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise UnsupportedModel(
            f"{title} has {len(unknown)} tensors in its layers that no {described.arch} model here "
            f"uses, the first {unknown[0][:60]!r}; take an unmodified, unquantized model"
        )

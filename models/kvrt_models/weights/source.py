"""Where the weights of a model are read from: a GGUF file or a folder, by tensor or by rows."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvrt.arrays import Float
from kvrt.errors import BadModelFile
from kvrt_models.families.shared.registry import family_of, folder_notes
from kvrt_models.file_digest import kept_digest
from kvrt_models.gguf import file as gguf
from kvrt_models.gguf.departures import departures
from kvrt_models.hf import safetensors
from kvrt_models.layers.tensors import is_norm, tensor_shape, tensors_of
from kvrt_models.spec import DecoderSpec

# Gives rows [start, end) of a tensor, counted over all axes but the last.
Rows = Callable[[int, int], Float[np.ndarray, "R I"]]
# Gives them as the blocks of a file, `ggml.Q8_0[R, I / 32]`.
BlockRows = Callable[[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A model's description and how its tensors are read, all as float32.

    Attributes:
      spec: of the decoder.
      tensor: reads a tensor by its GGUF name.
      rows: opens a tensor to be read by rows.
      called: what the files call a tensor, or those that it is made of.
      files: that hold the tensors.
      notes: lines about the description, for people.
      blocks: opens each tensor that the files have in blocks of eight bits.
    """

    spec: DecoderSpec
    tensor: Callable[[str], np.ndarray]
    rows: Callable[[str], Rows]
    called: Mapping[str, Sequence[str]]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    blocks: Mapping[str, BlockRows] = dataclasses.field(default_factory=dict)

    def whole(self, name: str) -> np.ndarray:
        """A tensor of the shape that the description wants.

        Raises:
          BadModelFile: it has another, or cannot be read.
        """
        x = self.tensor(name)
        check_shape(self.called[name], x.shape, tensor_shape(self.spec, name))
        return x

    def weight(self, names: Sequence[str], dtype: Any = None) -> np.ndarray:
        """The tensors that are the rows of one weight, rounded if a type of NumPy's is given."""
        found = [self.whole(name) for name in names]
        found = found if dtype is None else [x.astype(dtype) for x in found]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def digest(self, folder: Path, begin: Callable[[], None] = lambda: None) -> str:
        """xxh3-128 of the files' names and of all their bytes; see `kept_digest`.

        Raises:
          BadModelFile: a file cannot be read, or changes meanwhile.
        """
        hashed = xxhash.xxh3_128()
        for path in sorted(self.files):
            hashed.update(f"{path.name}\0{kept_digest(path, folder, begin)}\0".encode())
        return hashed.hexdigest()


def gguf_source(
    file: gguf.GGUFFile, spec: DecoderSpec, names: Mapping[str, Sequence[str]]
) -> WeightSource:
    """The tensors of a GGUF file; `names` are what it calls them."""
    table = tensors_of(spec)

    def tensor(name: str) -> np.ndarray:
        (called,), row = names[name], table[name]
        x = gguf.read_gguf_tensor(file, called)
        is_joined = row.joined is not None and called == row.joined[0]
        return row.make([x], row.shape) if is_joined and row.make else x

    def rows(name: str) -> Rows:
        called = names[name][0]
        return lambda start, end: gguf.read_gguf_tensor(file, called, slice(start, end))

    return WeightSource(
        spec=spec,
        tensor=tensor,
        rows=rows,
        called=names,
        files=file.parts,
        notes=departures(file.metadata),
        blocks=gguf_blocks(file, names),
    )


def gguf_blocks(file: gguf.GGUFFile, names: Mapping[str, Sequence[str]]) -> dict[str, BlockRows]:
    """Opens the tensors that a GGUF file has as Q8_0; `names` are what it calls all of them."""

    def opened(called: str) -> BlockRows:
        return lambda start, end: gguf.read_gguf_blocks(file, called, slice(start, end))

    of_type = {name: file.tensors[called].ggml_type for name, (called, *_) in names.items()}
    return {name: opened(names[name][0]) for name, kind in of_type.items() if kind == "Q8_0"}


def folder_source(
    folder: safetensors.Folder, spec: DecoderSpec, names: Mapping[str, Sequence[str]]
) -> WeightSource:
    """The tensors of a Hugging Face folder; `names` are those of which each one is made."""
    table, less_one = tensors_of(spec), family_of(spec.arch).norms_less_one

    def tensor(name: str) -> np.ndarray:
        parts = [safetensors.read_folder_tensor(folder, part) for part in names[name]]
        row = table[name]
        x = parts[0] if row.make is None else row.make(parts, row.shape)
        # The norm behind the gated delta rule is as it is in every file.
        is_less = less_one and is_norm(name) and ".ssm_" not in name
        return x + np.float32(1) if is_less else x

    def rows(name: str) -> Rows:
        called, shape = names[name][0], table[name].shape
        stored = folder.places[called].shape
        if table[name].make is None and stored == shape and len(shape) == 2:
            return lambda start, end: safetensors.read_folder_tensor(
                folder, called, slice(start, end)
            )
        x = tensor(name)
        check_shape(names[name], x.shape, shape)
        flat = x.reshape(-1, x.shape[-1])
        return lambda start, end: flat[start:end]

    files = tuple(dict.fromkeys(folder.tensors[part] for many in names.values() for part in many))
    return WeightSource(
        spec=spec,
        tensor=tensor,
        rows=rows,
        called=names,
        files=files,
        notes=folder_notes(folder.config, spec),
    )


def check_shape(called: Sequence[str], found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Refuses a tensor of another shape than the description's, by its names in the files.

    Raises:
      BadModelFile: it has one.
    """
    if found != wanted:
        others = f" with {len(called) - 1} more" if len(called) > 1 else ""
        raise BadModelFile(f"tensor {called[0]!r}{others} has shape {found}, {wanted} wanted")

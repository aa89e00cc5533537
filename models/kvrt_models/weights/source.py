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
from kvrt_models.layers.tensors import is_norm, tensors_of
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
      read: reads a tensor by the files' name, or rows of it, `[n, I]`; None is all.
      called: what the files call a tensor, or those that it is made of.
      files: that hold the tensors.
      stored: shapes of tensors of a folder; None of a GGUF, whose tensors are as they are wanted.
      notes: lines about the description, for people.
      blocks: opens each tensor that the files have in blocks of eight bits.
    """

    spec: DecoderSpec
    read: Callable[[str, slice | None], np.ndarray]
    called: Mapping[str, Sequence[str]]
    files: tuple[Path, ...]
    stored: Mapping[str, safetensors.StoredTensor] | None = None
    notes: tuple[str, ...] = ()
    blocks: Mapping[str, BlockRows] = dataclasses.field(default_factory=dict)

    def whole(self, name: str) -> np.ndarray:
        """A tensor of the shape that the description wants.

        Raises:
          BadModelFile: it has another, or cannot be read.
        """
        row, called = tensors_of(self.spec)[name], self.called[name]
        parts = [self.read(part, None) for part in called]
        x = row.make(parts, row.shape) if row.make and self._is_made(name) else parts[0]
        if self.stored is not None and family_of(self.spec.arch).norms_less_one:
            # The norm behind the gated delta rule is as it is in every file.
            x = x + np.float32(1) if is_norm(name) and ".ssm_" not in name else x
        check_shape(called, x.shape, row.shape)
        return x

    def rows(self, name: str) -> Rows:
        """Opens a tensor to be read by rows.

        Raises:
          BadModelFile: as `whole`.
        """
        called, shape = self.called[name][0], tensors_of(self.spec)[name].shape
        found = shape if self.stored is None else self.stored[called].shape
        if not self._is_made(name) and found == shape and (self.stored is None or len(shape) == 2):
            return lambda start, end: self.read(called, slice(start, end))
        flat = self.whole(name).reshape(-1, shape[-1])
        return lambda start, end: flat[start:end]

    def _is_made(self, name: str) -> bool:
        """Whether a tensor is made of what the files have."""
        row, called = tensors_of(self.spec)[name], self.called[name][0]
        if self.stored is not None:
            return row.make is not None
        return row.joined is not None and called == row.joined[0]

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

    def opened(called: str) -> BlockRows:
        return lambda start, end: gguf.read_gguf_blocks(file, called, slice(start, end))

    called = {name: parts[0] for name, parts in names.items()}
    return WeightSource(
        spec=spec,
        read=lambda called, rows: gguf.read_gguf_tensor(file, called, rows),
        called=names,
        files=file.parts,
        notes=departures(file.metadata),
        blocks={
            name: opened(x) for name, x in called.items() if file.tensors[x].ggml_type == "Q8_0"
        },
    )


def folder_source(
    folder: safetensors.Folder, spec: DecoderSpec, names: Mapping[str, Sequence[str]]
) -> WeightSource:
    """The tensors of a Hugging Face folder; `names` are those of which each one is made."""
    files = dict.fromkeys(folder.tensors[part] for many in names.values() for part in many)
    return WeightSource(
        spec=spec,
        read=lambda called, rows: safetensors.read_folder_tensor(folder, called, rows),
        called=names,
        files=tuple(files),
        stored=folder.places,
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

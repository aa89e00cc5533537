"""Hugging Face folders: config.json and tensors in one or several safetensors files."""

import dataclasses
import importlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvrt.errors import BadModelFile
from kvrt_models.header import brief
from kvrt_models.hf.json_file import parse_json, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS = 1 << 16
MAX_SHARDS = 1 << 12
MAX_NAME_BYTES = 255
MAX_DIMS = 8
MAX_VALUES = 1 << 48
_FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where one tensor lies in its file.

    Attributes:
      kind: storage type, as the header names it.
      shape: axes, slowest first.
      offset: first byte, counted from the start of the file.
      n_bytes: bytes in the file.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A checked folder; the files are opened again for each tensor.

    Attributes:
      path: the folder.
      config: config.json.
      tensors: tensor name -> file that holds it.
      places: tensor name -> where it lies there.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Path]
    places: Mapping[str, StoredTensor]


def open_hf_folder(path: str | os.PathLike[str]) -> Folder:
    """Reads config.json and which file holds which tensor; no tensor is read.

    Raises:
      BadModelFile: a file is missing, truncated or damaged, or the index does not fit the files.
    """
    path = Path(path)
    if not path.is_dir():
        raise BadModelFile(f"{path}: not a folder; give a Hugging Face folder or a .gguf file")
    config = read_json(path / "config.json")
    if (path / INDEX).exists():
        files, places = _indexed(path)
        return Folder(path=path, config=config, tensors=files, places=places)
    if not (path / SINGLE).exists():
        raise BadModelFile(
            f"{path}: no {SINGLE} and no {INDEX}; save the model in the safetensors format"
        )
    places, _ = read_header(path / SINGLE)
    files = dict.fromkeys(places, path / SINGLE)
    return Folder(path=path, config=config, tensors=files, places=places)


def read_folder_tensor(folder: Folder, name: str, rows: slice | None = None) -> np.ndarray:
    """One tensor as float32 in C order, in memory of its own.

    Args:
      folder: that holds it.
      name: of the tensor.
      rows: some of it, by the first axis; None is all.

    Raises:
      BadModelFile: no such tensor, a type that is not a float, or a file that cannot be read.
    """
    file = folder.tensors.get(name)
    if file is None:
        raise BadModelFile(f"{folder.path}: tensor {name!r} is wanted and missing")
    place = folder.places[name]
    if place.kind not in _FLOATS:
        raise BadModelFile(
            f"{file}: tensor {name!r} has type {place.kind}, one of {', '.join(_FLOATS)} is "
            f"wanted; save the model unquantized"
        )
    shape, offset, n_bytes = place.shape, place.offset, place.n_bytes
    if rows is not None:
        row_bytes, n = n_bytes // shape[0], rows.stop - rows.start
        shape, offset, n_bytes = (n, *shape[1:]), offset + rows.start * row_bytes, n * row_bytes
    try:
        with file.open("rb") as raw:
            data = np.fromfile(raw, np.uint8, n_bytes, offset=offset)
    except OSError as error:
        raise BadModelFile(f"{file}: cannot be read: {error.strerror or error}") from error
    if data.size != n_bytes:
        raise BadModelFile(
            f"{file}: {n_bytes} bytes of tensor {name!r} are wanted, {data.size} could be read: "
            f"the file has changed since it was opened; open it again"
        )
    values = data.view(_FLOATS[place.kind]).reshape(shape)
    try:
        with np.errstate(over="raise", invalid="ignore"):
            return values.astype(np.float32, copy=False)
    except FloatingPointError as error:
        raise BadModelFile(
            f"{file}: tensor {name!r} has values beyond float32; the file is damaged, fetch it "
            f"again"
        ) from error


def _indexed(path: Path) -> tuple[dict[str, Path], dict[str, StoredTensor]]:
    """Tensor name -> shard and place in it, from the index, after a look into every shard."""
    files = read_json(path / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(p, str) for p in files.values()):
        raise BadModelFile(f"{path / INDEX}: no weight_map of names to files; fetch it again")
    names = sorted(set(files.values()))
    if len(names) > MAX_SHARDS:
        raise BadModelFile(
            f"{path / INDEX}: {len(names)} shards, {MAX_SHARDS} are allowed; save the model in "
            f"fewer files"
        )
    shards = {shard: _shard(path, shard) for shard in names}
    for name, shard in files.items():
        if name not in shards[shard]:
            raise BadModelFile(
                f"{path / shard}: tensor {brief(name)} is missing, {INDEX} puts it there; fetch "
                f"the folder again"
            )
    places = {name: shards[shard][name] for name, shard in files.items()}
    return {name: path / shard for name, shard in files.items()}, places


def _shard(path: Path, shard: str) -> dict[str, StoredTensor]:
    """The tensors of a shard that the index names."""
    # A bare name: neither ".." nor a path can lead out of the folder.
    if shard in ("", ".", "..") or os.path.basename(shard) != shard or "\\" in shard:
        raise BadModelFile(
            f"{path / INDEX}: shard {brief(shard)} is not a file name inside the folder; it may "
            f"not hold a path"
        )
    if len(shard.encode()) > MAX_NAME_BYTES or not shard.isprintable():
        raise BadModelFile(
            f"{path / INDEX}: shard {brief(shard)} is no file name of at most {MAX_NAME_BYTES} "
            f"printable bytes; fetch it again"
        )
    if not (path / shard).exists():
        raise BadModelFile(f"{path / shard}: missing, {INDEX} names it; fetch the folder again")
    return read_header(path / shard)[0]


def read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors and metadata of a file, from a header whose sizes are looked at before it is read.

    Raises:
      BadModelFile: it cannot be read, is no safetensors file, or is damaged.
    """
    try:
        with file.open("rb") as raw:
            n_header = int.from_bytes(raw.read(8), "little")
            if n_header > MAX_HEADER_BYTES:
                raise BadModelFile(
                    f"{file}: its header would have {n_header} bytes, {MAX_HEADER_BYTES} are "
                    f"allowed; it is no safetensors file, or it is damaged"
                )
            text = raw.read(n_header)
    except OSError as error:
        raise BadModelFile(f"{file}: cannot be read: {error.strerror or error}") from error
    _check(file)
    entries = parse_json(file, text.decode(errors="replace"))
    said = entries.pop("__metadata__", None) or {}
    if len(entries) > MAX_TENSORS:
        raise BadModelFile(
            f"{file}: {len(entries)} tensors, {MAX_TENSORS} are allowed in a file; save the model "
            f"in several"
        )
    places = {name: _place(file, name, entry, 8 + n_header) for name, entry in entries.items()}
    return places, said


def _place(file: Path, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
    """An entry that the library has found sound: its type is known and its bytes are there."""
    shape, (first, end) = tuple(entry["shape"]), entry["data_offsets"]
    # NumPy counts values without regard to axes of length 0.
    if len(shape) > MAX_DIMS or math.prod(max(size, 1) for size in shape) > MAX_VALUES:
        raise BadModelFile(
            f"{file}: tensor {brief(name)} has {len(shape)} axes of up to {max(shape)} values, "
            f"{MAX_DIMS} axes and {MAX_VALUES} values in all are allowed; fetch it again"
        )
    return StoredTensor(kind=entry["dtype"], shape=shape, offset=start + first, n_bytes=end - first)


def _check(file: Path) -> None:
    """Leaves to the library whether the header's types, shapes and offsets fit the file."""
    # By name, since this module hides the package from type checkers.
    library = importlib.import_module("safetensors")
    try:
        with library.safe_open(file, framework="numpy"):
            pass
    except (OSError, library.SafetensorError) as error:
        raise BadModelFile(
            f"{file}: cannot be read: {' '.join(str(error).split())}; fetch it again"
        ) from error

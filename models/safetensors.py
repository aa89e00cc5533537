"""Hugging Face folders: config.json and tensors in one or several safetensors files."""

import dataclasses
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvrt.errors import BadModelFile
from models.json_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A checked folder; the files are opened again for each tensor.

    Attributes:
      path: the folder.
      config: config.json.
      tensors: tensor name -> file that holds it.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Path]


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Reads config.json and which file holds which tensor; no tensor is read.

    Raises:
      BadModelFile: a file is missing, truncated or damaged, or the index does not fit the files.
    """
    path = Path(path)
    if not path.is_dir():
        raise BadModelFile(f"{path}: not a folder; give a Hugging Face folder or a .gguf file")
    config = read_json(path / "config.json")
    if (path / INDEX).exists():
        return Folder(path=path, config=config, tensors=_indexed(path))
    if not (path / SINGLE).exists():
        raise BadModelFile(
            f"{path}: no {SINGLE} and no {INDEX}; save the model in the safetensors format"
        )
    names = _names(path / SINGLE)
    return Folder(path=path, config=config, tensors=dict.fromkeys(names, path / SINGLE))


def read_tensor(folder: Folder, name: str) -> np.ndarray:
    """One tensor as float32 in C order, in memory of its own.

    Raises:
      BadModelFile: no such tensor, a type that is not a float, or a file that cannot be read.
    """
    file = folder.tensors.get(name)
    if file is None:
        raise BadModelFile(f"{folder.path}: tensor {name!r} is wanted and missing")
    with _opened(file) as tensors:
        kind = tensors.get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise BadModelFile(
                f"{file}: tensor {name!r} has type {kind}, one of {', '.join(_FLOATS)} is wanted; "
                f"save the model unquantised"
            )
        try:
            # bfloat16 is no type of NumPy's own: the library asks ml_dtypes, which jax brings.
            with np.errstate(over="raise"):
                return np.array(tensors.get_tensor(name), np.float32, order="C")
        except FloatingPointError as error:
            raise BadModelFile(
                f"{file}: tensor {name!r} has values beyond float32; the file is damaged, fetch it "
                f"again"
            ) from error


def _indexed(path: Path) -> dict[str, Path]:
    """Tensor name -> shard, from the index, after a look into every shard."""
    places = read_json(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise BadModelFile(f"{path / INDEX}: no weight_map of names to files; fetch it again")
    shards = {}
    for shard in sorted(set(places.values())):
        # A bare name: neither ".." nor a path can lead out of the folder.
        if shard in ("", ".", "..") or os.path.basename(shard) != shard or "\\" in shard:
            raise BadModelFile(
                f"{path / INDEX}: shard {shard!r} is not a file name inside the folder; it may "
                f"not hold a path"
            )
        if not (path / shard).exists():
            raise BadModelFile(f"{path / shard}: missing, {INDEX} names it; fetch the folder again")
        shards[shard] = _names(path / shard)
    for name, shard in places.items():
        if name not in shards[shard]:
            raise BadModelFile(
                f"{path / shard}: tensor {name!r} is missing, {INDEX} puts it there; fetch the "
                f"folder again"
            )
    return {name: path / shard for name, shard in places.items()}


def _names(file: Path) -> set[str]:
    with _opened(file) as tensors:
        return set(tensors.keys())


def _opened(file: Path) -> Any:
    """A safetensors file, its header checked against its size by the library."""
    # By name, since this module hides the package from type checkers.
    library = importlib.import_module("safetensors")
    try:
        return library.safe_open(file, framework="numpy")
    except (OSError, library.SafetensorError) as error:
        raise BadModelFile(
            f"{file}: cannot be read: {' '.join(str(error).split())}; fetch it again"
        ) from error

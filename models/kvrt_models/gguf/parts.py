"""A GGUF model in several files, as `llama-gguf-split` writes them: the first has the metadata.

Source: llama.cpp `llama_split_path` and `llama_model_loader`.
"""

import dataclasses
import os
import re
from pathlib import Path

from kvrt.errors import BadModelFile
from kvrt_models.gguf.file import GGUFFile, TensorInfo, open_gguf
from kvrt_models.header import MAX_SIZE, Header, brief

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_REMEDY = "fetch the model's parts again into one folder, under their own names"


def part_paths(path: Path) -> list[Path]:
    """Files of the model that a file belongs to by its name, in order; often that file alone."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return [path]
    n = int(found[3])
    return [path.with_name(f"{found[1]}-{i:05}-of-{n:05}.gguf") for i in range(1, n + 1)]


def model_name(path: Path) -> str:
    """A model's name by that of its file, or of any of its parts."""
    found = _NAME.fullmatch(path.name)
    return path.stem if found is None else found[1]


def open_gguf_model(path: str | os.PathLike[str]) -> GGUFFile:
    """Parses the header of a GGUF model in one file or several; no tensor is read.

    Args:
      path: of the file, or of any of its parts.

    Raises:
      BadModelFile: as `open_gguf`, or a part is missing or of another model.
    """
    file = open_gguf(path)
    n = _number(file, "split.count")
    if n <= 1:
        return file
    no, paths = _number(file, "split.no"), part_paths(file.path)
    if len(paths) != n or no >= n or paths[no] != file.path:
        raise BadModelFile(
            f"{file.path}: it is part {no + 1} of {n}, and its name does not end in "
            f"-{no + 1:05}-of-{n:05}.gguf; {_REMEDY}"
        )
    missing = [part for part in paths if not part.exists()]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadModelFile(f"{missing[0]}: missing, part of {n}{more}; {_REMEDY}")
    return _joined([file if part == file.path else open_gguf(part) for part in paths])


def _joined(parts: list[GGUFFile]) -> GGUFFile:
    """The metadata of the first part with the tensors of all."""
    tensors: dict[str, TensorInfo] = {}
    for i, part in enumerate(parts):
        found = (_number(part, "split.no"), _number(part, "split.count"))
        if found != (i, len(parts)):
            raise BadModelFile(
                f"{part.path}: its header says part {found[0] + 1} of {found[1]}, its name part "
                f"{i + 1} of {len(parts)}; {_REMEDY}"
            )
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise BadModelFile(
                f"{part.path}: tensor {brief(twice[0])} is in an earlier part too; {_REMEDY}"
            )
        tensors |= part.tensors
    n = _number(parts[0], "split.tensors.count", len(tensors))
    if n != len(tensors):
        raise BadModelFile(
            f"{parts[0].path}: {len(tensors)} tensors in {len(parts)} parts, its header says {n}; "
            f"{_REMEDY}"
        )
    paths = tuple(part.path for part in parts)
    return dataclasses.replace(parts[0], parts=paths, tensors=tensors)


def _number(file: GGUFFile, key: str, default: int = 0) -> int:
    try:
        return Header(file.metadata).whole(key, default, least=0, most=MAX_SIZE)
    except BadModelFile as error:
        raise BadModelFile(f"{file.path}: {error}") from error

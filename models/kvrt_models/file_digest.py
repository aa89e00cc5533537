"""A model by the bytes of its files, before any of them is loaded."""

import hashlib
import os
from pathlib import Path

from kvrt.errors import BadModelFile, reason
from kvrt_models import hub
from kvrt_models.hf import spec as hf_spec
from kvrt_models.hf.json_file import read_json

# Of a folder, what weights, description and tokenizer are made of; a README changes nothing.
_ENDINGS = (".json", ".jinja", ".safetensors")


def model_digest(name_or_path: str) -> str:
    """sha256 of a model's files, hexadecimal; a known name has its pinned one and is not fetched.

    Raises:
      UsageError: neither a path that exists nor a known name.
      BadModelFile: a file cannot be read.
    """
    source = hub.KNOWN_MODELS.get(name_or_path)
    if source is not None and not os.path.exists(os.path.expanduser(name_or_path)):
        return source.sha256
    path = hub.resolve(name_or_path, progress=False)
    if not path.is_dir():
        return _file_digest(path)
    hashed = hashlib.sha256()
    for part in sorted(p for p in path.iterdir() if p.suffix in _ENDINGS and p.is_file()):
        hashed.update(f"{part.name}\0{_file_digest(part)}\n".encode())
    return hashed.hexdigest()


def depends_on_n_ctx(name_or_path: str) -> bool:
    """Whether RoPE of a model goes by the length of the context, so that n_ctx decides results."""
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        return False  # a GGUF file has no such rule
    groups = hf_spec.spec_from_config(read_json(path / "config.json")).groups
    return any(g.rope is not None and g.rope.by_length for g in groups)


def _file_digest(path: Path) -> str:
    if not path.is_file():
        raise BadModelFile(f"{path}: is no file; give a .gguf file or a Hugging Face folder")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read: {reason(error)}; copy it again") from error

"""A model by the bytes of its files, before any of them is loaded."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from kvrt.errors import BadModelFile, reason
from kvrt.files import kept, regular
from kvrt_models import hub
from kvrt_models.families.shared.registry import spec_from_config
from kvrt_models.gguf.parts import part_paths
from kvrt_models.hf.json_file import read_json

# Of a folder, what weights, description and tokenizer are made of; a README changes nothing.
_ENDINGS = (".json", ".jinja", ".safetensors")
_PART_BYTES = 1 << 20
# A file that changes again within a tick of its clock keeps its times; those of disks tick within
# this many seconds.
_TICK_S = 2.0


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
    if path.is_dir():
        parts = sorted(p for p in path.iterdir() if p.suffix in _ENDINGS and p.is_file())
    else:
        parts = part_paths(path)
        if len(parts) == 1:
            return _file_digest(path)
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(f"{part.name}\0{_file_digest(part)}\n".encode())
    return hashed.hexdigest()


def kept_digest(path: Path, folder: Path, begin: Callable[[], None] = lambda: None) -> str:
    """xxh3-128 of all bytes of a file, hexadecimal, kept for as long as the file stays as it is.

    A second call looks at the file's inode, size and times alone; see `regular.file_version`.

    Args:
      path: of the file.
      folder: of what is kept, one small file for each.
      begin: is called before the bytes are read.

    Raises:
      BadModelFile: it cannot be read, or changes meanwhile.
    """
    try:
        with regular.open_file(path) as file:
            status = os.fstat(file.fileno())
            now = regular.file_version(status)
            key = {"device": status.st_dev, "inode": status.st_ino}
            note = kept.kept_path(folder, "digest", key)
            found = kept.read_kept(note, key, _digest_and_version, f"{path} is digested")
            if found is not None and found[1] == now:
                return found[0]
            begin()
            at, hashed = time.time(), xxhash.xxh3_128()
            while part := file.read(_PART_BYTES):
                hashed.update(part)
            if regular.file_version(os.fstat(file.fileno())) != now:
                raise BadModelFile(f"{path}: changed while it was read; start again")
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read: {reason(error)}; copy it again") from error
    if at - max(status.st_mtime, status.st_ctime) > _TICK_S:
        kept.keep(note, key, [hashed.hexdigest(), now])
    return hashed.hexdigest()


def _digest_and_version(value: object) -> tuple[str, list[int]]:
    """What `kept_digest` keeps; raises ValueError or TypeError for anything else."""
    if not isinstance(value, list):
        raise TypeError("no list")
    digest, version = value
    if not isinstance(digest, str) or len(digest) != 32 or not isinstance(version, list):
        raise ValueError("no digest")
    return digest, version


def depends_on_n_ctx(name_or_path: str) -> bool:
    """Whether RoPE of a model goes by the length of the context, so that n_ctx decides results."""
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        return False  # a GGUF file has no such rule
    groups = spec_from_config(read_json(path / "config.json")).groups
    return any(g.rope is not None and g.rope.by_length for g in groups)


def _file_digest(path: Path) -> str:
    if not path.is_file():
        raise BadModelFile(f"{path}: is no file; give a .gguf file or a Hugging Face folder")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read: {reason(error)}; copy it again") from error

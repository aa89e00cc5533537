"""Weights of eight bits: quantized at a model's first start, kept in a file, mapped later.

A file is of one model and one rule. One that is damaged or of another is made anew, and those of a
model that has changed since are removed then. Where none can be kept the weights stay in memory,
and each start quantizes.
"""

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvrt.errors import BadModelFile, SaveError, UsageError, reason
from kvrt.files import atomic
from kvrt.files.cache_folder import private_folder
from kvrt_models import hub
from kvrt_models.layers.int8 import Int8Matrix
from kvrt_models.layers.linear import Matrix
from kvrt_models.layers.tensors import is_matrix, weight_parts, weight_shape
from kvrt_models.weights.kept_file import KeptFile, Stale, Writer, open_kept, remove_older
from kvrt_models.weights.quantized import MOST_ERROR, Rounded, round_matrix
from kvrt_models.weights.shapes import n_bytes, weight_shapes
from kvrt_models.weights.source import WeightSource

FOLDER = "weights"  # in the cache folder
_SCALE = ".scale"
_N_THREADS = 2
# For another process that quantizes the same; then each has its own in memory.
_WAIT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """Who is told how loading goes.

    Attributes:
      tell: gets a line about what went otherwise than it should.
      show: gets matrices that are quantized, and how many there are.
      digest: is called before all bytes of a file are read, which its first start does.
    """

    tell: Callable[[str], None] = lambda line: None
    show: Callable[[int, int], None] = lambda n, n_all: None
    digest: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """Weights that are quantized.

    Attributes:
      in_bf16: matrices that are not, and why.
      read: gives a weight by its name, once.
    """

    in_bf16: Mapping[str, str]
    read: Callable[[str], Matrix]


def open_or_make(source: WeightSource, name: str, watch: Watch) -> Made:
    """Maps the weights that were kept, or quantizes them and keeps them for the next start.

    Raises:
      BadModelFile: a tensor is damaged.
    """
    maker = _Maker(source, watch)
    try:
        folder = private_folder(FOLDER)
        maker.of = {"source": source.digest(folder, watch.digest), "rule": _rule(source)}
        path = folder / f"{_plain(name)}-{maker.of['source'][:16]}.safetensors"
        file = maker.opened(path) or maker.made(path)
    except (OSError, UsageError, SaveError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        watch.tell(
            f"weights of eight bits are not kept ({why}), so that each start quantizes them; make "
            "room, or set KVRT_CACHE to a folder of your own"
        )
        return maker.in_memory()
    return Made(in_bf16=json.loads(file.notes["in_bf16"]), read=_FromFile(maker, file).read)


def kept_bytes() -> tuple[Path, int]:
    """The folder of kept weights and the bytes of its files, 0 where it is not there yet.

    Raises:
      UsageError: there is no cache folder.
    """
    folder, n = hub.cache_dir() / FOLDER, 0
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # another process may have removed it meanwhile
            n += path.stat().st_size
    return folder, n


class _Maker:
    """Quantizes the weights of one source; `of` is what a kept file is of, if there can be any."""

    def __init__(self, source: WeightSource, watch: Watch):
        self.source, self.watch = source, watch
        self.parts = weight_parts(source.spec)
        self.of: dict[str, str] = {}
        self.model = os.path.commonpath([path.absolute() for path in source.files])

    def opened(self, path: Path) -> KeptFile | None:
        """The file that is there; None if it cannot be used, which is told."""
        try:
            file = open_kept(path, self.of)
            self._check(file)
        except FileNotFoundError:
            return None
        except Stale as why:
            self.watch.tell(f"{path}: kept weights are {why}; they are quantized anew")
            return None
        return file

    def made(self, path: Path) -> KeptFile:
        """Quantizes all into a new file, unless another process has done so meanwhile.

        Raises:
          OSError: it cannot be written. Likewise SaveError.
        """
        before = path.stat().st_mtime_ns if path.exists() else None
        with atomic.locked(path, _WAIT_S):
            now = path.stat().st_mtime_ns if path.exists() else None
            file = self.opened(path) if now != before else None
            if file is None:
                atomic.replace(path, self._write)
                remove_older(path, self.model)
        file = file or self.opened(path)
        if file is None:
            raise SaveError(f"{path} cannot be read back")
        return file

    def in_memory(self) -> Made:
        """Quantizes all into memory."""
        found: dict[str, Any] = {}
        in_bf16: dict[str, str] = {}
        self._each(found.__setitem__, in_bf16)
        return Made(in_bf16=in_bf16, read=found.pop)

    def one(self, name: str) -> Matrix:
        """A weight read from the source once more."""
        with ThreadPoolExecutor(_N_THREADS) as pool:
            found = self._rounded(name, pool)
        self._check_unchanged()
        # NumPy's arrays stand for those of a device until they are bound to one.
        weight: Any = found.matrix if isinstance(found, Rounded) else found
        return weight

    def _write(self, fd: int) -> None:
        shapes = weight_shapes(self.source.spec, "int8", blocks=self.source.blocks)
        names = [n for name in shapes for n in (name, name + _SCALE)]
        out = Writer(fd, n_bytes(shapes), names)
        in_bf16: dict[str, str] = {}

        def add(name: str, x: Any) -> None:
            if isinstance(x, Int8Matrix):
                out.add(name + _SCALE, np.asarray(x.scale))
                x = x.values
            out.add(name, np.asarray(x))

        self._each(add, in_bf16)
        self._check_unchanged()
        out.finish({**self.of, "model": self.model, "in_bf16": json.dumps(in_bf16)})

    def _each(self, take: Callable[[str, Any], None], in_bf16: dict[str, str]) -> None:
        """Gives each weight to `take`, and notes which matrices have no eight bits."""
        n_all = sum(map(self._is_matrix, self.parts))
        n = 0
        with ThreadPoolExecutor(_N_THREADS) as pool:
            for name in self.parts:
                self.watch.show(n, n_all)
                found = self._rounded(name, pool)
                if isinstance(found, Rounded):
                    n += 1
                    if found.why_not is not None:
                        in_bf16[name] = found.why_not
                    take(name, found.matrix)
                else:
                    take(name, found)
                del found

    def _rounded(self, name: str, pool: ThreadPoolExecutor) -> Rounded | np.ndarray:
        tensors = self.parts[name]
        if self._is_matrix(name):
            return round_matrix(self.source, tensors, pool)
        return self.source.weight(tensors)

    def _check_unchanged(self) -> None:
        """Refuses weights of files that have changed since they were digested."""
        if self.source.digest(private_folder(FOLDER)) != self.of["source"]:
            raise BadModelFile(f"{self.model}: changed while it was read; start again")

    def _is_matrix(self, name: str) -> bool:
        return is_matrix(name, weight_shape(self.source.spec, self.parts[name]))

    def _check(self, file: KeptFile) -> None:
        """Refuses a file whose tensors are not those of the model; raises Stale."""
        try:
            in_bf16 = json.loads(file.notes["in_bf16"])
            blocks = self.source.blocks
            wanted = weight_shapes(self.source.spec, "int8", in_bf16.keys(), blocks=blocks)
        except (KeyError, ValueError, AttributeError) as error:
            raise Stale("damaged") from error
        shapes: dict[str, Any] = {}
        for name, x in wanted.items():
            if isinstance(x, Int8Matrix):
                kind = "F16" if x.scale.dtype == np.float16 else "F32"
                shapes[name + _SCALE] = (kind, x.scale.shape)
                shapes[name] = ("I8", x.values.shape)
            else:
                shapes[name] = ("BF16" if name in in_bf16 else "F32", x.shape)
        if {name: (p.kind, p.shape) for name, p in file.places.items()} != shapes:
            raise Stale("damaged")


class _FromFile:
    """Takes weights from a file; what is damaged there is quantized anew."""

    def __init__(self, maker: _Maker, file: KeptFile):
        self._maker, self._file = maker, file
        self._told, self._lock = False, threading.Lock()

    def read(self, name: str) -> Matrix:
        """A weight by its name."""
        values: Any = self._file.array(name)
        if name + _SCALE not in self._file.places:
            return self._anew(name) if values is None else values
        scale: Any = self._file.array(name + _SCALE)
        if values is None or scale is None:
            return self._anew(name)
        return Int8Matrix(values=values, scale=scale)

    def _anew(self, name: str) -> Matrix:
        with self._lock:
            path, told, self._told = self._file.path, self._told, True
        if not told:
            self._maker.watch.tell(
                f"{path}: kept weights are damaged, {name} is the first; those are quantized anew, "
                "and all of them by the next start"
            )
            path.unlink(missing_ok=True)
        return self._maker.one(name)


def _rule(source: WeightSource) -> str:
    """Digest of what decides how a source's weights are kept."""
    shapes = weight_shapes(source.spec, "int8", blocks=source.blocks)
    sizes = {
        name: (x.values.shape if isinstance(x, Int8Matrix) else x.shape)
        for name, x in shapes.items()
    }
    said = json.dumps([MOST_ERROR, sizes], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(said.encode())


def _plain(name: str) -> str:
    """A model's name as a part of a file's."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)[:80]

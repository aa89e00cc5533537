"""The identity of code: a class of one's own by its names and source, folders by their files."""

import abc
import contextlib
import functools
import hashlib
import inspect
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol

# Bases that say nothing. A class made by `type` has the module of its metaclass, that of `abc`.
_OF_PYTHON = (object, abc.ABC, Generic, Protocol)


@functools.cache
def class_identity(cls: type) -> dict[str, str | None]:
    """Names a class of one's own; kvrt's classes have their `version` alone, if any.

    Module, qualified name, `version`, and sha256 of the source of the class, its methods and its
    bases up to kvrt's; None where no source is to be had.
    """
    version = str(getattr(cls, "version", ""))
    if _is_ours(cls):
        return {"version": version} if version else {}
    texts = [text for x in cls.__mro__ if not _is_ours(x) for text in _sources(x)]
    source = hashlib.sha256("\0".join(texts).encode()).hexdigest() if texts else None
    named = {"module": cls.__module__, "name": cls.__qualname__}
    return {**named, "version": version, "source": source}


def python_digest(folders: Sequence[Path]) -> str:
    """sha256 of the Python files in some folders and below, and of their names; hexadecimal."""
    hashed = hashlib.sha256()
    for root in map(str, folders):
        # Plain strings: paths take a start ten times as long.
        for folder, _, names in sorted(os.walk(root)):
            for name in sorted(x for x in names if x.endswith(".py")):
                path = os.path.join(folder, name)
                hashed.update(f"{os.path.relpath(path, root)}\0".encode())
                hashed.update(Path(path).read_bytes())
    return hashed.hexdigest()


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "kvrt" or cls in _OF_PYTHON


def _sources(cls: type) -> Iterator[str]:
    """The source of a class, and of each method: by its name alone a class may be found wrong."""
    members = (getattr(x, "fget", None) or getattr(x, "__func__", x) for x in vars(cls).values())
    for x in (cls, *filter(inspect.isfunction, members)):
        with contextlib.suppress(OSError, TypeError):
            yield textwrap.dedent(inspect.getsource(x))

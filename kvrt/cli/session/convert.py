"""`kvrt convert`: a copy of a session with another KV dtype, or for another program."""

import dataclasses
import os
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import Any, get_args

from kvrt import Runtime, session
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.flags.session_files import ConvertOptions
from kvrt.cli.process import output, startup
from kvrt.cli.setup import config as settings
from kvrt.files import atomic
from kvrt.files.typed_json import read_typed
from kvrt.kv_types import KVDtype
from kvrt.session import described
from kvrt.session.change import edit, replace
from kvrt.session.interop import llama_read, llama_write, mlx_read, mlx_write, source
from kvrt.session.interop.llama_format import SEQUENCE, WHOLE
from kvrt.session.io import existing
from kvrt.session.snapshot import Snapshot
from kvrt.sizes import extent
from kvrt.whole_numbers import Count
from kvrt_models import load

_Write = Callable[[BufferedIOBase], None]


def execute(options: ConvertOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from being done; nothing is written then.
    """
    assert options.session is not None and options.output is not None
    new = Path(options.output)
    path = existing(Path(options.session))
    old = session.read(path) if options.model is None else _read(path, options.model, options)
    row_type = _row_type(options.to)
    if row_type is not None:
        turns = _given(options)
        made = edit.convert(old, row_type, row_type, hadamard=turns)
        session.save(new, made, before=replace.refuse_existing)
    else:
        _write(new, _writer(old, options))
    if not options.quiet:
        output.note(f"{new}: {options.to}, {new.stat().st_size:,} bytes")
    return 0


def _read(path: Path, name: str, options: ConvertOptions) -> Snapshot:
    """A file of another program, as a session of a model.

    Raises:
      BadSession: it is damaged, or no such file.
      SessionMismatch: it is of another shape than the model's caches.
    """
    with source.open_source(path) as at:
        is_llama = at.number("u4", "the magic number") in (WHOLE, SEQUENCE)
        reader = llama_read if is_llama else mlx_read
    startup.check_device()
    with startup.enough_memory():
        model = load.load(name, dtype=options.dtype or "auto", progress=not options.quiet)
        left = startup.available_bytes()
        flags = settings.sized(EvalFlags(), model.spec, 0, left, quiet=options.quiet)
        config = settings.cache_config(flags, model.spec.n_ctx_train)
        runtime = Runtime(model.decoder, config, identity=model.identity)
        spec, said = model.spec, runtime.fingerprint
    ids = None if options.tokens is None else _ids_by_sequence(options.tokens)
    rest: dict[str, Any] = dict(tokens=ids, hadamard=_given(options))
    if reader is mlx_read:
        rest = dict(tokens=None if ids is None else ids.get(0, []))
    found = reader.read(path, said, spec.groups, arch=spec.arch, n_vocab=spec.n_vocab, **rest)
    # Such files have cells for what they hold and no more; a session says how many there may be.
    sizes = [extent(g, config).n_cells for g in spec.groups]
    parts = [
        dataclasses.replace(part, n_cells=max(part.n_cells, n))
        for part, n in zip(found.groups, sizes, strict=True)
    ]
    return dataclasses.replace(found, groups=tuple(parts))


def _row_type(wanted: str | None) -> KVDtype | None:
    return next((row_type for row_type in get_args(KVDtype) if row_type == wanted), None)


def _given(options: ConvertOptions) -> bool | None:
    """Whether the Hadamard transform is wanted, None where no flag says."""
    return options.hadamard if "hadamard" in options.given else None


def _writer(old: Snapshot, options: ConvertOptions) -> _Write:
    """What writes the file of another program."""
    groups, arch = described.groups(old.fingerprint), described.arch(old.fingerprint)
    how: dict[str, Any] = dict(arch=arch, seq_id=options.seq, old=options.legacy_format)
    if options.to == "mlx":
        what = 'notes, as in {"model": "name"}'
        notes = None if options.notes is None else read_typed(dict[str, str], options.notes, what)
        return lambda file: mlx_write.write(file, old, groups, notes=notes, **how)
    whole = options.to == "llama.cpp"
    return lambda file: llama_write.write(file, old, groups, whole=whole, **how)


def _ids_by_sequence(path: str) -> dict[int, list[int]]:
    """Ids from a JSON file: a list is of sequence 0; raises BadConfig for anything else."""
    what = "token ids, a list or lists by sequence, as kvrt inspect --tokens --json prints them"
    found = read_typed(list[Count] | dict[Count, list[Count]], path, what)
    return found if isinstance(found, dict) else {0: found}


def _write(path: Path, write: _Write) -> None:
    """The whole file or nothing."""

    def to_descriptor(fd: int) -> None:
        with os.fdopen(os.dup(fd), "wb") as file:
            write(file)

    with atomic.locked(path), atomic.told_of(path):
        replace.refuse_existing(path)
        atomic.replace(path, to_descriptor)

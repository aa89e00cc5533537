"""`kvrt fork`, `trim`, `repair`, `convert`: a session cut, cleaned, mended or in another form."""

import dataclasses
import os
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import Any, get_args

from kvrt import Runtime, session
from kvrt.cellcache import history as texts
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.flags.session_files import ConvertOptions, ForkOptions, RepairOptions, TrimOptions
from kvrt.cli.process import output, startup
from kvrt.cli.report import phrases
from kvrt.cli.report.phrases import counted
from kvrt.cli.setup import config as settings
from kvrt.errors import BadSession, SaveError, UsageError
from kvrt.files import atomic
from kvrt.files.typed_json import read_typed
from kvrt.kv_types import KVDtype
from kvrt.session import described
from kvrt.session.change import edit, replace
from kvrt.session.change.repair import Repaired, repaired
from kvrt.session.interop import llama, mlx, source
from kvrt.session.interop.llama_format import SEQUENCE, WHOLE
from kvrt.session.io import existing, real_path
from kvrt.session.library import stored
from kvrt.session.library.stored import bytes_on_disk
from kvrt.session.snapshot import Snapshot
from kvrt.sizes import extent
from kvrt.whole_numbers import Count
from kvrt_models import load

_SHOWN = 8  # damaged parts that are listed


def execute_fork(options: ForkOptions) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    assert options.session is not None and options.output is not None and options.at is not None
    new = Path(options.output)
    old = session.read(existing(Path(options.session)))
    n = n_tokens(old)
    short = cut_at(old, options.at, "--at")
    done = session.save(new, short, before=replace.refuse_existing)
    if not options.quiet:
        output.note(
            f"{new}: {options.at:,} of {phrases.counted(n, 'token')}, {done.n_bytes:,} bytes"
        )
        note_checkpoints(new, old, short)
    return 0


def note_checkpoints(path: Path, old: Snapshot, new: Snapshot) -> None:
    """Says which context checkpoints a shorter copy lacks."""
    gone = sorted({x.pos for x in old.checkpoints} - {x.pos for x in new.checkpoints})
    if gone:
        output.note(f"{path}: {phrases.checkpoints_left_out(gone)}")


def n_tokens(snapshot: Snapshot) -> int:
    """Tokens of the first sequence."""
    return texts.entries(snapshot.history, min(snapshot.seq_ids, default=0)).shape[1]


def cut_at(snapshot: Snapshot, n: int, flag: str) -> Snapshot:
    """The snapshot with the first n tokens of its first sequence.

    Raises:
      UsageError: it has fewer, or two tokens share the position of the cut.
      CannotRewind: its layers could not resume there.
    """
    seq_id = min(snapshot.seq_ids, default=0)
    pos = texts.positions(snapshot.history, seq_id)
    if n > len(pos):
        raise UsageError(f"{flag} {n}: the session holds {len(pos):,} tokens; give at most as many")
    if n == len(pos):
        return snapshot
    if pos[n] == pos[n - 1]:
        raise UsageError(
            f"{flag} {n}: tokens {n - 1} and {n} share position {pos[n]} and stay together; give "
            "another number"
        )
    return edit.cut(snapshot, seq_id, int(pos[n]))


def execute_trim(options: TrimOptions) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    assert options.session is not None
    path = real_path(existing(Path(options.session)))
    new = path if options.output is None else Path(options.output)
    snapshot = session.read(path)
    before = bytes_on_disk(path)
    short = snapshot if options.keep is None else cut_at(snapshot, options.keep, "--keep")
    kept = _write(new, snapshot, short)
    if not options.quiet:
        after = bytes_on_disk(new)
        output.note(f"{new}: {after:,} bytes, {before - after:,} less than before")
        note_checkpoints(new, snapshot, short)
        if kept is not None:
            output.note(f"{new}: the former session is kept as {kept}")
    return 0


def _write(path: Path, old: Snapshot, new: Snapshot) -> Path | None:
    """Writes a session anew; returns where the former one is, if tokens of it went."""
    kept: list[Path] = []

    def before(path: Path) -> None:
        if not os.path.lexists(path):
            return
        if not replace.read_held(path).is_same(replace.held_by(old)):
            raise SaveError(f"{path}: another process has changed it meanwhile; trim it again")
        if new is not old:
            kept.append(replace.keep_former(path))

    try:
        kind = "folder" if path.is_dir() else "file"
        session.save(path, new, kind, before=before, anew=True)
    except BadSession as error:
        raise SaveError(f"{error}; it was sound a moment ago, trim it again") from error
    return kept[0] if kept else None


def execute_repair(options: RepairOptions) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    assert options.session is not None
    path = real_path(existing(Path(options.session)))
    target = path if options.output is None else Path(options.output)
    status = stored.status(path)

    def before(at: Path) -> None:
        if target != path:
            replace.refuse_existing(at)
            return
        now = stored.status(path)
        if status is None or now is None or not stored.is_same(status, now):
            raise SaveError(f"{path}: another process has changed it meanwhile; repair it again")
        kept.append(replace.keep_damaged(path))

    kept: list[Path] = []
    result = repaired(path)
    if not result.damage:
        if not options.quiet:
            output.note(f"{path}: sound, there is nothing to repair")
        return 0
    if not result.snapshot.seq_ids:
        raise BadSession(
            f"{path}: {_listed(result.damage)}: no token is left before that; kvrt run --overwrite "
            f"replaces it, and keeps it as {path.name}~"
        )
    session.save(target, result.snapshot, before=before, anew=True)
    if not options.quiet:
        _report(target, result)
        for at in kept:
            output.note(f"{target}: the damaged session is kept as {at}")
    return 0


def _report(target: Path, result: Repaired) -> None:
    """What was damaged, and what each sequence has lost."""
    n, n_kept = sum(result.n_tokens.values()), sum(result.n_kept.values())
    output.note(f"{target}: {n_kept:,} of {counted(n, 'token')} kept; {_listed(result.damage)}")
    if len(result.n_tokens) == 1:
        return
    lost = {s: n - result.n_kept[s] for s, n in result.n_tokens.items()}
    whole = [s for s, n in lost.items() if not n]
    output.note(f"{target}: {len(whole):,} of {len(lost):,} sequences are whole")
    for s in [s for s, n in lost.items() if n][:_SHOWN]:
        n, n_kept = result.n_tokens[s], result.n_kept[s]
        output.note(f"{target}: sequence {s} has its first {n_kept:,} of {counted(n, 'token')}")


def _listed(damage: tuple[str, ...]) -> str:
    more = f" and {len(damage) - _SHOWN:,} more parts" if len(damage) > _SHOWN else ""
    return f"damaged: {', '.join(damage[:_SHOWN])}{more}"


_Foreign = Callable[[BufferedIOBase], None]


def execute_convert(options: ConvertOptions) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    assert options.session is not None and options.output is not None
    new = Path(options.output)
    path = existing(Path(options.session))
    old = (
        session.read(path) if options.model is None else _read_foreign(path, options.model, options)
    )
    row_type = next((x for x in get_args(KVDtype) if x == options.to), None)
    if row_type is not None:
        turns = _given(options)
        made = edit.convert(old, row_type, row_type, hadamard=turns)
        session.save(new, made, before=replace.refuse_existing)
    else:
        _write_foreign(new, _writer(old, options))
    if not options.quiet:
        output.note(f"{new}: {options.to}, {new.stat().st_size:,} bytes")
    return 0


def _read_foreign(path: Path, name: str, options: ConvertOptions) -> Snapshot:
    """A file of another program, as a session of a model.

    Raises:
      BadSession: it is damaged, or no such file.
      SessionMismatch: it is of another shape than the model's caches.
    """
    with source.open_source(path) as at:
        is_llama = at.number("u4", "the magic number") in (WHOLE, SEQUENCE)
        reader = llama if is_llama else mlx
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
    if reader is mlx:
        rest = dict(tokens=None if ids is None else ids.get(0, []))
    found = reader.read(path, said, spec.groups, arch=spec.arch, n_vocab=spec.n_vocab, **rest)
    # Such files have cells for what they hold and no more; a session says how many there may be.
    sizes = [extent(g, config).n_cells for g in spec.groups]
    parts = [
        dataclasses.replace(part, n_cells=max(part.n_cells, n))
        for part, n in zip(found.groups, sizes, strict=True)
    ]
    return dataclasses.replace(found, groups=tuple(parts))


def _given(options: ConvertOptions) -> bool | None:
    """Whether the Hadamard transform is wanted, None where no flag says."""
    return options.hadamard if "hadamard" in options.given else None


def _writer(old: Snapshot, options: ConvertOptions) -> _Foreign:
    """What writes the file of another program."""
    groups, arch = described.groups(old.fingerprint), described.arch(old.fingerprint)
    how: dict[str, Any] = dict(arch=arch, seq_id=options.seq, old=options.legacy_format)
    if options.to == "mlx":
        what = 'notes, as in {"model": "name"}'
        notes = None if options.notes is None else read_typed(dict[str, str], options.notes, what)
        return lambda file: mlx.write(file, old, groups, notes=notes, **how)
    whole = options.to == "llama.cpp"
    return lambda file: llama.write(file, old, groups, whole=whole, **how)


def _ids_by_sequence(path: str) -> dict[int, list[int]]:
    """Ids from a JSON file: a list is of sequence 0; raises BadConfig for anything else."""
    what = "token ids, a list or lists by sequence, as kvrt inspect --tokens --json prints them"
    found = read_typed(list[Count] | dict[Count, list[Count]], path, what)
    return found if isinstance(found, dict) else {0: found}


def _write_foreign(path: Path, write: _Foreign) -> None:
    """The whole file or nothing."""

    def to_descriptor(fd: int) -> None:
        with os.fdopen(os.dup(fd), "wb") as file:
            write(file)

    with atomic.locked(path), atomic.told_of(path):
        replace.refuse_existing(path)
        atomic.replace(path, to_descriptor)

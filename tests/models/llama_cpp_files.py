"""Files of llama.cpp that come with the source distribution of its Python package, fetched once."""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import filelock

from kvrt_models import hub

PIN = "llama-cpp-python==0.3.36"
N_BYTES = 76_589_250
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_ROOT = "llama_cpp_python-0.3.36/vendor/llama.cpp/"
_WANTED = ("models/ggml-vocab-", "models/templates/", "conversion/base.py")


def llama_cpp_files() -> Path:
    """The folder of its vocabularies, chat templates and converter, kept in the cache folder."""
    kept = hub.cache_dir() / "tests"
    kept.mkdir(exist_ok=True)
    folder = kept / PIN
    with filelock.FileLock(kept / f"{PIN}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=kept) as temporary:
                _fetch(Path(temporary)).rename(folder)
    return folder


def _fetch(into: Path) -> Path:
    # pip asks the package for its metadata, which builds nothing.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--no-binary", "llama-cpp-python", "--retries", "1", "--dest", str(into), PIN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{PIN} could not be fetched: {done.stderr[-600:]}"
    (archive,) = into.glob("*.tar.gz")
    with archive.open("rb") as file:
        found = archive.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    assert found == (N_BYTES, SHA256), f"{archive.name} is not the pinned file: {found}"
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith(tuple(_ROOT + name for name in _WANTED)):
                tar.extract(member, into, filter="data")
    return into / _ROOT

"""A tiny model for the command line, and `main` called in this process with its output caught."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrt.cli.main import main

sys.path.append(str(Path(__file__).parents[1] / "peer"))
import tiny_gguf

PROMPT = "the sand"
Run = Callable[..., "Done"]


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    out: bytes
    err: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A one-layer model with random weights, trained for 512 tokens by its own account."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(n_layers=1))


@pytest.fixture(scope="session")
def cache(request, tmp_path_factory) -> Path:
    """One cache folder for all tests and workers, so that each program is compiled once.

    With --programs it lies there, and the next run finds them too. JAX's key of a program does not
    say whether it was optimised.
    """
    folder = tmp_path_factory.getbasetemp()
    if programs := request.config.getoption("--programs"):
        kind = "as-shipped" if request.config.getoption("--as-shipped") else "quick"
        folder = Path(programs).absolute() / f"commands-{kind}"
    elif "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "kvrt-cache"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@pytest.fixture
def kvrt(capfdbinary, cache, monkeypatch, tmp_path) -> Run:
    """`main` in this process."""
    monkeypatch.setenv("KVRT_CACHE", str(cache))

    def run(*args: object, stdin: bytes = b"") -> Done:
        given = tmp_path / "stdin"
        given.write_bytes(stdin)
        kept = os.dup(0)
        with given.open("rb") as file:
            os.dup2(file.fileno(), 0)
        try:
            code = main([str(arg) for arg in args])
        finally:
            os.dup2(kept, 0)
            os.close(kept)
        out, err = capfdbinary.readouterr()
        return Done(code, out, err.decode())

    return run


@pytest.fixture
def go(kvrt, tiny) -> Run:
    """`kvrt run` on the tiny model, at most 24 tokens, greedy, in 64 cells unless told otherwise.

    Steps take 8 tokens, so that prompts of all lengths are steps of few sizes. A flag given again
    counts, so a test may change any of these.
    """

    def run(*args: object, stdin: bytes = b"", prompt: bool = True) -> Done:
        given = ["-p", PROMPT] if prompt else []
        fixed = ["run", "-m", tiny, "-c", 64, "-n", 24, "--temp", 0, "--n_ubatch", 8, *given]
        return kvrt(*fixed, *args, stdin=stdin)

    return run


BOOK = "the sand of the sea and the rest of the land in the mist on the water and the otter"


@pytest.fixture
def book(tmp_path) -> Path:
    """A text."""
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    return path


@pytest.fixture(scope="session")
def made() -> dict[str, bytes]:
    """Sessions that were made already."""
    return {}


@pytest.fixture
def prefilled(kvrt, tiny, book, tmp_path, made) -> Path:
    """A session of the text, in 64 cells."""
    path = tmp_path / "book.kv"
    if "book" not in made:
        done = kvrt("prefill", "-m", tiny, "-c", 64, "-f", book, "-o", path)
        assert (done.code, done.out) == (0, b""), done.err
        assert "no such session yet" in done.err and "tokens read in" in done.err
        assert path.stat().st_mode & 0o777 == 0o600
        made["book"] = path.read_bytes()
    path.write_bytes(made["book"])
    return path


@functools.cache
def vocabulary() -> list[bytes]:
    """The bytes of each token, none for control tokens; by the model's own table."""
    byte = {tiny_gguf._letter(b): b for b in range(256)}
    control = (tiny_gguf.BOS, tiny_gguf.EOS)
    words = ["" if word in control else word for word in tiny_gguf.vocabulary()]
    return [bytes(byte[letter] for letter in word) for word in words]


def text_of(ids: list[int]) -> str:
    """What ids say."""
    return b"".join(vocabulary()[i] for i in ids).decode("utf-8", "replace")

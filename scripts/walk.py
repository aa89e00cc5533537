"""How much of kvrt one decode step enters: files, and lines of the functions in them.

    python -m scripts.walk

A step of the toy decoder is profiled twice, of a Runtime and of an Engine in cells and in blocks.
The first decode step traces its program, so it walks what runs on the host and what is traced for
the device; a warm one walks the host alone. What a reader has to know to follow one token is about
what these numbers say; `docs/concepts.md` goes through the files of a Runtime's step in order. One
JSON line on standard output, the tables on standard error.
"""

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from absl import app
from rich.console import Console
from rich.table import Table

from kvrt import CacheConfig, Engine, EngineConfig, Request, Runtime
from kvrt.options.engine import Mode
from scripts._lib import measure
from scripts.toy_decoder import ToyDecoder

_ROOT = Path(__file__).resolve().parent.parent / "kvrt"
_CONFIG = CacheConfig(n_ctx=32, type_k="f32", type_v="f32")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    found = walked()
    sums = {
        f"{name}_{what}".replace(" ", "_"): n
        for name, of in found.items()
        for what, n in (("files", len(of)), ("lines", sum(of.values())))
    }
    measure.emit("walk", **sums)
    for side in _SIDES:
        columns = [found[f"{side}{name}"] for name in ("traced", "warm")]
        table = Table("file", "with the first trace", "warm", title=side or "Runtime")
        for path in sorted({*columns[0], *columns[1]}):
            table.add_row(path, *(str(of.get(path, "")) for of in columns))
        Console(stderr=True).print(table)


def walked() -> dict[str, dict[str, int]]:
    """Lines by file of a decode step that traces its program, and of a warm one, by side."""
    found = {}
    for side, step in _SIDES.items():
        run = step()
        found |= {f"{side}{name}": lines(entered(run)) for name in ("traced", "warm")}
    return found


def _of_runtime() -> Callable[[], Any]:
    runtime = Runtime(ToyDecoder(), _CONFIG)
    runtime.prefill([1, 2, 3])
    return lambda: runtime.append([4])


def _of_engine(mode: Mode) -> Callable[[], Any]:
    config = dataclasses.replace(_CONFIG, n_ctx=256, block_size=16)
    engine = Engine(ToyDecoder(), config, EngineConfig(mode=mode))
    engine.add_request(Request(id="a", tokens=(1, 2, 3), n_predict=9))
    engine.step()
    return engine.step


def entered(run: Callable[[], Any]) -> set[CodeType]:
    """The functions of kvrt that a call enters; what lies in another one counts with that."""
    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        # Checks of annotations, which tests turn on, are no part of a step.
        if event == "call" and frame.f_code.co_name != "__instancecheck__":
            found.add(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {code for code in found if Path(code.co_filename).is_relative_to(_ROOT)}


def lines(codes: set[CodeType]) -> dict[str, int]:
    """Lines of these functions by file, each line once."""
    found: dict[str, set[int]] = collections.defaultdict(set)
    for code in codes:
        numbers = [n for *_, n in code.co_lines() if n]
        path = str(Path(code.co_filename).relative_to(_ROOT.parent))
        found[path] |= set(range(code.co_firstlineno, max(numbers, default=0) + 1))
    return {path: len(numbers) for path, numbers in found.items()}


_SIDES = {
    "": _of_runtime,
    "engine in cells ": functools.partial(_of_engine, "cell"),
    "engine in blocks ": functools.partial(_of_engine, "paged"),
}

if __name__ == "__main__":
    app.run(main)

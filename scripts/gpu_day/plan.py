"""What a day on a GPU or TPU measures, most important first: data, made without a device."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts._lib import shapes

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tests", "tiles", "decode", "prefill", "upkeep")
# In the order of their worth.
SHAPES = ("llama-3.1-8b", "llama-3.2-1b", "smollm2-135m", "gemma-3-27b")
BATCHES = (32, 1, 8, 64)
CONTEXTS = (4096, 131_072, 1024, 32_768, 8192)
N_PROMPT = 512
# Tests whose kernels are compiled on their platform; later kernels have files named like these.
TESTS = {
    "gpu": ("tests/attention/test_*gpu*.py", "tests/serving/test_kernels.py"),
    "tpu": ("tests/attention/test_*tpu*.py", "tests/serving/test_kernels.py"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement: sides that are interleaved, or tests of one file.

    Attributes:
      part: of `PARTS`.
      what: "attention" or "step"; "k_shift" or "defrag"; a kernel's name whose tiles are searched;
        a file of tests.
      shape: model of these sizes.
      group: of the shape's layers, by number, where attention is alone.
      batch: sequences.
      context: tokens of each in the cache; of upkeep all cells.
      n_new: tokens of each in the step.
      type_kv: KV dtype of keys and values; weights are f32 with f32, else bf16.
      block_size: cells of a block.
      tuned: tile sizes that were found before are taken.
      peers: "quick" ones, which compile in seconds, or "all".
      select: pytest's -k.
    """

    part: str
    what: str
    shape: str = ""
    group: int = 0
    batch: int = 1
    context: int = 0
    n_new: int = 1
    type_kv: str = "bf16"
    block_size: int = 256
    tuned: bool = False
    peers: str = "quick"
    select: str = ""

    @property
    def name(self) -> str:
        """What it is called in the results: the same in every run."""
        if self.part == "tests":
            return f"tests {self.what}"
        found = [self.part, self.what, self.shape]
        found += [f"group {self.group}"] if self.group else []
        found += [f"batch {self.batch}", f"context {self.context}", self.type_kv]
        found += [f"{self.n_new} tokens"] if self.n_new > 1 else []
        found += [f"blocks of {self.block_size}"] if self.block_size != 256 else []
        return " ".join([*found, *(["tuned"] if self.tuned else [])])

    @property
    def kind(self) -> str:
        """Cells of a kind take about as long."""
        return f"{self.part} {self.what}" if self.part in ("decode", "prefill") else self.part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """Who does the same beside kvrt.

    Attributes:
      name: in the tables.
      what: "attention" or "step".
      platforms: where it runs.
      needs: a module that has to be installed.
      parts: of `PARTS`.
      all_only: it is left out where only quick peers are wanted.
    """

    name: str
    what: str = "attention"
    platforms: tuple[str, ...] = ("gpu",)
    needs: str = ""
    parts: tuple[str, ...] = ("decode", "prefill")
    all_only: bool = False


PEERS = (
    Peer(name="jax.nn xla", platforms=("gpu", "tpu", "cpu")),
    Peer(name="jax.nn cudnn"),
    Peer(name="jax paged_attention", parts=("decode",), platforms=("gpu", "cpu")),
    Peer(name="jax ragged_paged_attention", platforms=("tpu",)),
    Peer(name="torch sdpa", needs="torch", all_only=True, platforms=("gpu", "cpu")),
    Peer(name="flashinfer", needs="flashinfer", all_only=True),
    Peer(name="torch step", what="step", needs="torch", all_only=True, platforms=("gpu", "cpu")),
)


def peers(cell: Cell, platform: str) -> list[Peer]:
    """Who is timed beside kvrt; a static cache of a windowed layer's prompt would be a band."""
    windowed = bool(cell.shape and shapes.SHAPES[cell.shape].groups[cell.group].mask.size)
    return [
        peer
        for peer in PEERS
        if peer.what == cell.what
        and platform in peer.platforms
        and cell.part in peer.parts
        and (cell.peers == "all" or not peer.all_only)
        and not (windowed and cell.part == "prefill" and peer.what == "attention")
    ]


def aim(cell: Cell) -> float | None:
    """Share of a copy's bandwidth that is wanted, None where none is set."""
    match cell.part, cell.what:
        case "decode", "attention" if _windowed(cell):
            return None
        case "decode", "attention" if cell.context >= 131_072:
            return 0.90
        case "decode", "attention" if (cell.batch, cell.context) == (32, 4096):
            return 0.83
        case "decode", "step" if cell.shape == "llama-3.1-8b":
            return 0.80
        case "upkeep", "k_shift":
            return 0.50
        case "upkeep", "defrag":
            return 0.33
    return None


def _windowed(cell: Cell) -> bool:
    return bool(shapes.SHAPES[cell.shape].groups[cell.group].mask.size)


def plan(platform: str, kernels: Sequence[str], only: Sequence[str] = PARTS) -> list[Cell]:
    """All cells in the order of their worth.

    Args:
      platform: "gpu" or "tpu".
      kernels: names of those whose tiles may be searched.
      only: of `PARTS`.
    """
    found = [
        *tests(platform),
        *_first(),
        *_tiles(kernels),
        *_first(tuned=True, peers="all"),
        *_upkeep(SHAPES[:1]),
        *_grid(),
        *_upkeep(SHAPES[1:]),
        *itertools.chain(*(_prefill(n, batch) for n in (0, *CONTEXTS) for batch in BATCHES)),
    ]
    return [cell for cell in dict.fromkeys(found) if cell.part in only]


def tests(platform: str) -> Iterator[Cell]:
    """The files of tests for a platform."""
    for pattern in TESTS[platform]:
        for path in sorted(ROOT.glob(pattern)):
            yield Cell(part="tests", what=str(path.relative_to(ROOT)))


def _first(tuned: bool = False, peers: str = "quick") -> Iterator[Cell]:
    """What the aims are about."""
    of: dict[str, Any] = {"part": "decode", "shape": SHAPES[0], "tuned": tuned, "peers": peers}
    for batch, context in ((32, 4096), (1, 131_072)):
        yield Cell(what="attention", batch=batch, context=context, **of)
    for batch, context in ((1, 4096), (32, 4096)):
        yield Cell(what="step", batch=batch, context=context, **of)


def _tiles(kernels: Sequence[str]) -> Iterator[Cell]:
    """The forms that most models have, and for each a step that shows what sizes are worth."""
    for kernel in kernels:
        of: dict[str, Any] = {"part": "tiles", "what": kernel}
        yield Cell(shape=SHAPES[0], batch=32, context=4096, **of)
        yield Cell(shape=SHAPES[1], batch=32, context=4096, **of)
        yield Cell(shape=SHAPES[0], context=4096, n_new=N_PROMPT, **of)
        yield Cell(shape=SHAPES[0], batch=32, context=4096, type_kv="int8", **of)
        yield Cell(shape=SHAPES[0], batch=32, context=4096, block_size=16, **of)


def _grid() -> Iterator[Cell]:
    """Everything, a context of all batches and shapes after the other; prompts behind the first."""
    for nth, (context, batch) in enumerate(itertools.product(CONTEXTS, BATCHES)):
        all_peers = context in CONTEXTS[:2] and batch in BATCHES[:2]
        of: dict[str, Any] = {"batch": batch, "context": context, "tuned": True}
        of["peers"] = "all" if all_peers else "quick"
        for shape in SHAPES:
            yield from _decode(shape, of)
        if nth < len(CONTEXTS):
            yield from _prefill((0, *CONTEXTS)[nth])


def _decode(shape: str, of: dict[str, Any]) -> Iterator[Cell]:
    for group, spec in enumerate(shapes.SHAPES[shape].groups):
        # What a window sees does not grow with the context.
        if not spec.mask.size or of["context"] == CONTEXTS[0]:
            yield Cell(part="decode", what="attention", shape=shape, group=group, **of)
    yield Cell(part="decode", what="step", shape=shape, **of)
    if shape == SHAPES[0] and of["batch"] in BATCHES[:2]:
        yield Cell(part="decode", what="attention", shape=shape, type_kv="int8", **of)


def _prefill(context: int, batch: int = 1) -> Iterator[Cell]:
    for shape in SHAPES:
        of: dict[str, Any] = {"shape": shape, "context": context, "n_new": N_PROMPT, "tuned": True}
        of["batch"] = batch
        full = [i for i, g in enumerate(shapes.SHAPES[shape].groups) if not g.mask.size]
        if context:
            yield Cell(part="prefill", what="attention", group=full[0], **of)
        yield Cell(part="prefill", what="step", **of)


def _upkeep(names: Sequence[str]) -> Iterator[Cell]:
    for shape, n_cells in itertools.product(names, (32_768, 131_072)):
        for what in ("k_shift", "defrag"):
            yield Cell(part="upkeep", what=what, shape=shape, context=n_cells)


def smoke(kernels: Sequence[str], only: Sequence[str] = PARTS) -> list[Cell]:
    """Every part with tiny shapes, for a machine without an accelerator."""
    of: dict[str, Any] = {"shape": "toy", "type_kv": "f32", "block_size": 64}
    file, test = "tests/attention/test_pallas_gpu.py", "test_sizes_of_a_program"
    found = [
        Cell(part="tests", what=file, select=test),
        *(Cell(part="tiles", what=name, group=1, batch=2, context=100, **of) for name in kernels),
        Cell(part="decode", what="attention", batch=2, context=100, tuned=True, peers="all", **of),
        Cell(part="decode", what="step", batch=2, context=100, tuned=True, peers="all", **of),
        Cell(part="prefill", what="attention", group=1, context=64, n_new=8, **of),
        Cell(part="prefill", what="step", context=64, n_new=8, **of),
        Cell(part="upkeep", what="k_shift", context=512, **of),
        Cell(part="upkeep", what="defrag", context=512, **of),
    ]
    return [cell for cell in found if cell.part in only]

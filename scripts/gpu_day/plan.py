"""The commands of a day on a GPU or TPU, most important first: data, made without a device."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# By part, the seconds that a command takes before one of its kind was run.
PARTS = {"tests": 120.0, "tiles": 80.0, "decode": 60.0, "prefill": 60.0, "upkeep": 40.0}
# In the order of their worth.
SHAPES = ("llama-3.1-8b", "llama-3.2-1b", "smollm2-135m", "gemma-3-27b")
CONTEXTS = (4096, 131_072, 1024, 32_768, 8192)
BATCHES = "32,1,8,64"
# Tests whose kernels are compiled on "gpu" or "tpu"; later ones have names like these.
TESTS = ("tests/attention/test_*{}*.py", "tests/serving/test_kernels.py")


@dataclasses.dataclass(frozen=True)
class Command:
    """A module of the scripts, with its flags.

    Attributes:
      part: of `PARTS`.
      words: of the command line.
      tuned: tile sizes that were found before are in force.
      aim: share of a copy's bandwidth that is wanted of kvrt's sides.
    """

    part: str
    words: tuple[str, ...]
    tuned: bool = False
    aim: float | None = None

    @property
    def name(self) -> str:
        """What it is called in the results: the same in every run."""
        return " ".join(self.words) + " tuned" * self.tuned


def _bench(part: str, module: str, *flags: str, **more: object) -> Command:
    """A bench of one shape, bf16 weights and cache where nothing else is said."""
    types = ("--type_k", "bf16", "--type_v", "bf16")
    types = () if "--type_k" in flags else types
    return Command(part, (f"scripts.bench.{module}", *flags, *types), **more)  # pyright: ignore


def _decode(what: str, shape: str, batch: str, context: int, *flags: str, **more) -> Command:
    sizes = ("--shape", shape, "--dtype", "bf16", "--batch", batch, "--context", str(context))
    part = "prefill" if "--n_new" in flags else "decode"
    return _bench(part, "decode", "--what", what, *sizes, *flags, **more)


def plan(platform: str, kernels: Sequence[str], only: Sequence[str] = (*PARTS,)) -> list[Command]:
    """All commands in the order of their worth.

    Args:
      platform: "cuda", "rocm" or "tpu".
      kernels: names of those whose tiles may be searched.
      only: of `PARTS`.
    """
    found = [
        *tests(platform),
        *_first("--peers", "quick"),
        *(command for kernel in kernels for command in _tiles(kernel)),
        *_first(tuned=True),
        *_upkeep(SHAPES[:1]),
        *_grid(),
        *_upkeep(SHAPES[1:]),
    ]
    return [command for command in dict.fromkeys(found) if command.part in only]


def tests(platform: str) -> Iterator[Command]:
    """The files of tests for a platform."""
    for pattern in TESTS:
        for path in sorted(ROOT.glob(pattern.format("tpu" if platform == "tpu" else "gpu"))):
            yield _tests(platform, str(path.relative_to(ROOT)))


def _tests(platform: str, file: str, *flags: str) -> Command:
    words = ("scripts.gpu_day.kernel_tests", "--platform", platform, "--file", file)
    return Command("tests", (*words, *flags))


def _first(*flags: str, tuned: bool = False) -> Iterator[Command]:
    """What the aims are about."""
    shape = SHAPES[0]
    yield _decode("attention", shape, "32", 4096, *flags, tuned=tuned, aim=0.83)
    yield _decode("attention", shape, "1", 131_072, *flags, tuned=tuned, aim=0.90)
    yield _decode("step", shape, "1,32", 4096, *flags, tuned=tuned, aim=0.80)


def _tiles(kernel: str) -> Iterator[Command]:
    """The forms that most models have."""
    for shape, *flags in (
        (SHAPES[0], "--batch", "32"),
        (SHAPES[1], "--batch", "32"),
        (SHAPES[0], "--n_new", "512"),
        (SHAPES[0], "--batch", "32", "--type_k", "int8", "--type_v", "int8"),
        (SHAPES[0], "--batch", "32", "--block_size", "16"),
    ):
        sizes = ("--attention", kernel, "--shape", shape, "--context", "4096")
        yield _bench("tiles", "tiles", *sizes, *flags)


def _grid() -> Iterator[Command]:
    """All contexts of all shapes; a prompt's 512 tokens behind nothing, and behind each."""
    int8 = ("--type_k", "int8", "--type_v", "int8")
    new = ("--n_new", "512", "--peers", "quick")
    for nth, (context, shape) in enumerate(itertools.product(CONTEXTS, SHAPES)):
        peers = ("--peers", "all" if context in CONTEXTS[:2] else "quick")
        yield _decode("attention,step", shape, BATCHES, context, *peers, tuned=True)
        if shape == SHAPES[0]:
            yield _decode("attention", shape, "32,1", context, *int8, *peers, tuned=True)
        behind = (0, *CONTEXTS)[nth // len(SHAPES)]
        yield _decode("attention,step", shape, BATCHES, behind, *new, tuned=True)
    for shape in SHAPES:
        yield _decode("attention,step", shape, BATCHES, CONTEXTS[-1], *new, tuned=True)


def _upkeep(names: Sequence[str]) -> Iterator[Command]:
    for shape, n_cells, (what, aim) in itertools.product(
        names, (32_768, 131_072), (("k_shift", 0.50), ("defrag", 0.33))
    ):
        flags = ("--what", what, "--shape", shape, "--n_ctx", str(n_cells))
        yield _bench("upkeep", "upkeep", *flags, aim=aim)


def smoke(only: Sequence[str] = (*PARTS,)) -> list[Command]:
    """Every part with tiny shapes, for a machine without an accelerator."""
    types = ("--shape", "toy", "--type_k", "f32", "--type_v", "f32", "--runs", "2")
    small = (*types, "--block_size", "64", "--interpret")
    two = (*small, "--batch", "2", "--context", "100")
    found = [
        _tests("cpu", "tests/attention/test_pallas_gpu.py", "--select", "test_sizes_of_a_program"),
        _bench("tiles", "tiles", *two, "--seconds", "3"),
        *(_bench("decode", "decode", "--what", x, *two, tuned=True) for x in ("attention", "step")),
        _bench("prefill", "decode", *small, "--context", "64", "--n_new", "8"),
        _bench("upkeep", "upkeep", "--what", "k_shift,defrag", *types, "--n_ctx", "512"),
    ]
    return [command for command in found if command.part in only]

"""Flags that the benches of random weights share, and the cases that they ask for."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from absl import app, flags

from kvrt.attention.pallas import tiles
from kvrt.cli.process.startup import available_bytes
from kvrt.errors import NoKernel
from kvrt.kv_types import FLOAT_DTYPES, FloatType, KVDtype
from kvrt.options.cache import Implementation, RopeMode
from kvrt_models.weights.types import WeightType
from scripts._lib import commands, implementations, measure, shapes
from scripts._lib.cases import Case

# The whole score matrix at once is for tests: timed where asked for.
_TIMED = [x for x in get_args(Implementation) if x != "reference"]
# Of what the device has left, beside what programs take while they run.
_SHARE = 0.9

_SHAPE = flags.DEFINE_enum("shape", "smollm2-135m", sorted(shapes.SHAPES), "Model of these sizes.")
_LAYERS = flags.DEFINE_integer("layers", None, "Only its first layers.", lower_bound=1)
_BATCH = flags.DEFINE_list("batch", ["1"], "Sequences of a step.")
_CONTEXT = flags.DEFINE_list("context", ["1024"], "Tokens of each sequence in the cache.")
_N_NEW = flags.DEFINE_list("n_new", ["1"], "Tokens of each sequence in a step.")
_TYPE_K = flags.DEFINE_enum("type_k", "f32", get_args(KVDtype), "KV dtype of keys.")
_TYPE_V = flags.DEFINE_enum("type_v", "f32", get_args(KVDtype), "KV dtype of values.")
_ROPE = flags.DEFINE_enum("rope", "write", get_args(RopeMode), "When keys are rotated.")
_ATTENTION = flags.DEFINE_list(
    "attention", [], f"Implementations, {', '.join(get_args(Implementation))}; none is all timed."
)
_DTYPE = flags.DEFINE_enum("dtype", "f32", get_args(WeightType), "Type of the matrices.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 256, "Cells of a block.", lower_bound=1)
_RUNS = flags.DEFINE_integer("runs", 31, "Samples of each figure.", lower_bound=1)
_TILES = flags.DEFINE_string("tiles", None, "A table of tile sizes in force, beside kvrt's own.")
_INTERPRET = flags.DEFINE_bool("interpret", False, "Kernels of every platform, interpreted.")
_WITHOUT = flags.DEFINE_list("without", [], "Sides that are left out.")


def n_runs() -> int:
    """Samples of each figure."""
    return _RUNS.value


def check(what: flags.FlagHolder[list[str]], kinds: Sequence[str]) -> None:
    """Refuses values that flags cannot tell.

    Args:
      what: the flag that says what is measured.
      kinds: what it may name.

    Raises:
      app.UsageError: not a number, a name that does not exist, too many layers.
    """
    commands.check_names(what, kinds)
    check_sizes()


def check_sizes() -> None:
    """Refuses values of the shared flags.

    Raises:
      app.UsageError: as of `check`.
    """
    for flag, least in ((_BATCH, 1), (_CONTEXT, 0), (_N_NEW, 1)):
        if not all(x.isdecimal() and int(x) >= least for x in flag.value):
            named = ",".join(flag.value)
            raise app.UsageError(f"--{flag.name}={named}; whole numbers from {least} on wanted")
    commands.check_names(_ATTENTION, get_args(Implementation))
    try:
        shapes.shape(_SHAPE.value, _LAYERS.value)
    except ValueError as error:
        raise app.UsageError(f"--layers: {error}") from error


def names() -> list[str]:
    """Implementations that are asked for, whether they run here or not."""
    if _INTERPRET.value and not _ATTENTION.value:
        return implementations.running(interpret=True)
    return _ATTENTION.value or _TIMED


def table() -> tiles.Table | None:
    """Tile sizes in force; None are those that kvrt comes with."""
    if _TILES.value is None:
        return None
    return {**tiles.packaged_table(), **tiles.parse_table(Path(_TILES.value).read_text())}


def in_force(name: str, table: tiles.Table | None) -> str:
    """A name of the implementation with tile sizes of a table in force."""
    return implementations.with_options(name, table, interpret=_INTERPRET.value)


def cases() -> Iterator[list[Case]]:
    """What the flags ask for: cases that differ by their implementation alone, size after size."""
    # Flags know no literal types.
    same: dict[str, Any] = {
        "spec": shapes.shape(_SHAPE.value, _LAYERS.value),
        "dtype": _DTYPE.value,
        "type_k": _TYPE_K.value,
        "type_v": _TYPE_V.value,
        "rope": _ROPE.value,
        "block_size": _BLOCK_SIZE.value,
    }
    force: Any = table()
    sizes = itertools.product(*(map(int, x.value) for x in (_N_NEW, _BATCH, _CONTEXT)))
    for n_new, n_batch, context in sizes:
        size = {"n_new": n_new, "n_batch": n_batch, "context": context}
        found: list[Case] = []
        for name in names():
            attention: Any = name
            if implementations.refusal(name, interpret=_INTERPRET.value) is None:
                attention = in_force(name, force)
            found.append(Case(attention=attention, **size, **same))
        yield found


def named(case: Case) -> dict[str, object]:
    """What a line of results says of a case."""
    whole = shapes.shape(_SHAPE.value).n_layers
    note = {} if case.spec.n_layers == whole else {"note": f"a slice of {whole} layers"}
    plain = {"attention": implementations.plain_name(case.attention)}
    return {"shape": _SHAPE.value, **case.figures, **plain, **note}


def wanted(side: str) -> bool:
    """Whether a side is not left out."""
    return side not in _WITHOUT.value


def check_kernel(case: Case) -> None:
    """Refuses a case whose attention this device cannot run.

    Raises:
      NoKernel: it cannot.
    """
    lacking = implementations.refusal(case.attention)
    if lacking:
        raise NoKernel(lacking)


def no_room(n_bytes: int) -> str | None:
    """Why something of so many bytes is not tried, None where it fits."""
    limit = _SHARE * available_bytes()
    if n_bytes <= limit:
        return None
    return f"needs {measure.gib(n_bytes)} GiB of {measure.gib(limit)} that are free"


def peer_dtype(case: Case, usual: FloatType) -> str:
    """The type of a peer's cache: ours, or its usual one where ours is quantized."""
    names: dict[str, str] = {**FLOAT_DTYPES}
    return names[case.type_k if case.type_k in names else usual]

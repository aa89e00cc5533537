"""Flags that the benchmarks of random weights share, and the cases that they ask for."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import jax
from absl import app, flags

from kvrt.attention.registry import require
from kvrt.cli.process.startup import available_bytes
from kvrt.config import Implementation, RopeMode
from kvrt.errors import NoKernel
from kvrt.kv_types import FLOAT_DTYPES, FloatType, KVDtype
from kvrt_models.weights.types import WeightType
from scripts._lib import commands, measure, shapes
from scripts._lib.cases import Case

# The whole score matrix at once is for tests: timed where asked for.
_TIMED = [x for x in get_args(Implementation) if x != "reference"]
# Of what the device has left, beside what programs take while they run.
_SHARE = 0.9

_SHAPE = flags.DEFINE_enum("shape", "smollm2-135m", sorted(shapes.SHAPES), "Model of these sizes.")
_LAYERS = flags.DEFINE_integer("layers", None, "Only its first layers.", lower_bound=1)
_BATCH = flags.DEFINE_list("batch", ["1"], "Sequences of a step.")
_CONTEXT = flags.DEFINE_list("context", ["1024"], "Tokens of each sequence in the cache.")
_TYPE_K = flags.DEFINE_enum("type_k", "f32", get_args(KVDtype), "KV dtype of keys.")
_TYPE_V = flags.DEFINE_enum("type_v", "f32", get_args(KVDtype), "KV dtype of values.")
_ROPE = flags.DEFINE_enum("rope", "write", get_args(RopeMode), "When keys are rotated.")
_ATTENTION = flags.DEFINE_list(
    "attention", [], f"Implementations, {', '.join(get_args(Implementation))}; none is all timed."
)
_DTYPE = flags.DEFINE_enum("dtype", "f32", get_args(WeightType), "Type of the matrices.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 256, "Cells of a block.", lower_bound=1)
_RUNS = flags.DEFINE_integer("runs", 31, "Samples of each figure.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Also draw bytes a second by context, into this file.")


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
    for flag in (_BATCH, _CONTEXT):
        if not all(x.isdecimal() for x in flag.value):
            raise app.UsageError(f"--{flag.name}={flag.value}; whole numbers wanted")
    if "0" in _BATCH.value:
        raise app.UsageError("--batch=0; at least one sequence wanted")
    commands.check_names(what, kinds)
    commands.check_names(_ATTENTION, get_args(Implementation))
    try:
        shapes.shape(_SHAPE.value, _LAYERS.value)
    except ValueError as error:
        raise app.UsageError(f"--layers: {error}") from error


def cases(n_new: int = 1) -> Iterator[Case]:
    """All cases that the flags ask for, n_new tokens of each sequence in a step."""
    # Flags know no literal types.
    same: dict[str, Any] = {
        "spec": shapes.shape(_SHAPE.value, _LAYERS.value),
        "dtype": _DTYPE.value,
        "type_k": _TYPE_K.value,
        "type_v": _TYPE_V.value,
        "rope": _ROPE.value,
        "block_size": _BLOCK_SIZE.value,
        "n_new": n_new,
    }
    attention: Any
    for attention in _ATTENTION.value or _TIMED:
        for n_batch in map(int, _BATCH.value):
            for context in map(int, _CONTEXT.value):
                yield Case(attention=attention, n_batch=n_batch, context=context, **same)


def named(case: Case) -> dict[str, object]:
    """What a line of results says of a case."""
    whole = shapes.shape(_SHAPE.value).n_layers
    note = {} if case.spec.n_layers == whole else {"note": f"a slice of {whole} layers"}
    return {"shape": _SHAPE.value, **case.figures, **note}


def no_kernel(case: Case) -> str | None:
    """Why this device cannot run a case's attention, None where it can."""
    try:
        require(case.attention, jax.default_backend())
    except NoKernel as error:
        return str(error)
    return None


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


def plot(lines: list[dict]) -> None:
    """Draws the rates of measured lines by context, beside that of a copy, where it was asked."""
    drawn = [x for x in lines if "gb_s" in x]
    if not _PLOT.value or not drawn:
        return
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports]

    figure, axes = plt.subplots(figsize=(7, 4.5))
    sides: dict[str, list[dict]] = {}
    for line in drawn:
        side = f"{line['bench']} {line['side']}, batch {line['batch']}"
        sides.setdefault(side, []).append(line)
    for side, found in sides.items():
        found.sort(key=lambda line: line["context"])
        axes.plot(
            [line["context"] for line in found],
            [line["gb_s"] for line in found],
            marker="o",
            label=side,
        )
    axes.axhline(measure.copy_gb_s(), color="black", linestyle="--", label="copy")
    axes.set(xscale="log", xlabel="tokens of context", ylabel="GB/s", title=_SHAPE.value)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(_PLOT.value, dpi=120)

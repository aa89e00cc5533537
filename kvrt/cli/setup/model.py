"""Weights and compiled programs, which take about as long and do not wait for each other."""

import dataclasses

from kvrt import Runtime
from kvrt.cli.process import output, status
from kvrt.cli.setup.sampling import request
from kvrt.config import GroupSpec
from kvrt.errors import UsageError
from kvrt.options.option import Options
from kvrt.program.disk_hits import CompileProgress
from kvrt_models import hub, load
from kvrt_models.decoder import Decoder
from kvrt_models.load import Opened
from kvrt_models.spec import DecoderSpec
from kvrt_models.weights.int8_weights import Watch
from kvrt_models.weights.types import WeightType


def open_with_status(
    name: str, *, dtype: WeightType, on_host: bool, quiet: bool, window_sinks: int = 0
) -> Opened:
    """`kvrt_models.load.open_model`, which fetches with a bar and says what it reads after that.

    Args:
      name: of the model.
      dtype: of its matrices.
      on_host: weights stay in NumPy.
      quiet: nothing is shown.
      window_sinks: first tokens that windowed layers go on seeing.

    Raises:
      UsageError: there is no such model, or there are sinks and no windows.
      BadModelFile: it is damaged.
    """
    path = hub.resolve(name, progress=not quiet)
    with status.waiting(f"reading header and tokenizer of {path.name}", not quiet) as say:
        watch = Watch(
            tell=output.warn,
            show=lambda n, n_all: say(f"quantizing weights, {n:,} of {n_all:,}"),
            digest=lambda: say("reading all of the model's file once, for its digest"),
        )
        opened = load.open_model(path, dtype=dtype, on_host=on_host, watch=watch)
    if not window_sinks:
        return opened
    spec = with_window_sinks(opened.spec, window_sinks)
    return dataclasses.replace(opened, spec=spec, shapes=Decoder(spec, opened.weights.shapes))


def with_window_sinks(spec: DecoderSpec, n_sink: int) -> DecoderSpec:
    """A model whose windowed layers go on seeing the first n_sink tokens; itself without any.

    Raises:
      UsageError: no layer has a window.
    """
    if not n_sink:
        return spec
    if not any(g.mask.kind == "window" for g in spec.groups):
        raise UsageError(
            f"--window_sinks {n_sink}: no layer of this model has a window; leave it out"
        )

    def seen(group: GroupSpec) -> GroupSpec:
        if group.mask.kind != "window":
            return group
        return dataclasses.replace(group, mask=dataclasses.replace(group.mask, n_sink=n_sink))

    return dataclasses.replace(spec, groups=tuple(map(seen, spec.groups)))


def compile_programs(
    runtime: Runtime, model: Opened, options: Options, n_tokens: int, *, quiet: bool
) -> None:
    """Compiles what a prompt of n_tokens needs, and binds the weights.

    What its answer needs is compiled behind that, while the prompt is read: `await_programs`.
    """

    def reading(n: int, n_all: int) -> None:
        say(f"reading weights, {n:,} of {n_all:,} tensors there")

    with status.waiting("compiling programs", not quiet) as say:
        wanted = request(options, model.tokenizer)
        runtime.prepare(n_tokens, wanted, progress=compiling(say))
        runtime.bind(model.wait(reading).decoder)


def await_programs(runtime: Runtime, *, quiet: bool) -> None:
    """Waits for what `compile_programs` left: a text does not stop behind its first token."""
    if runtime.programs.n_pending:
        with status.waiting("compiling programs", not quiet) as say:
            runtime.programs.wait(compiling(say))


def compiling(say: status.Say) -> CompileProgress:
    """Says how many programs are there."""

    def show(n: int, n_all: int, n_from_disk: int) -> None:
        disk = f", {n_from_disk} from the disk" if n_from_disk else ""
        say(f"compiling programs, {n:,} of {n_all:,} there{disk}")

    return show

"""Weights and compiled programs, which take about as long and do not wait for each other."""

from kvrt import Runtime
from kvrt.cli.flags.declare import Options
from kvrt.cli.process import output, status
from kvrt.cli.setup.sampling import request
from kvrt_models import hub, load
from kvrt_models.load import Opened
from kvrt_models.weights.int8_weights import Watch
from kvrt_models.weights.types import WeightType


def open_with_status(name: str, *, dtype: WeightType, on_host: bool, quiet: bool) -> Opened:
    """`kvrt_models.load.open_model`, which fetches with a bar and says what it reads after that."""
    path = hub.resolve(name, progress=not quiet)
    with status.waiting(f"reading header and tokenizer of {path.name}", not quiet) as say:
        watch = Watch(
            tell=output.warn,
            show=lambda n, n_all: say(f"quantizing weights, {n} of {n_all}"),
            measure=lambda: say("measuring how this machine multiplies eight bits, once"),
        )
        return load.open_model(path, dtype=dtype, on_host=on_host, watch=watch)


def compile_programs(
    runtime: Runtime, model: Opened, options: Options, n_tokens: int, *, quiet: bool
) -> None:
    """Compiles what a prompt of n_tokens and its answer need, and binds the weights."""

    def compiling(n: int, n_all: int, n_from_disk: int) -> None:
        disk = f", {n_from_disk} from the disk" if n_from_disk else ""
        say(f"compiling programs, {n} of {n_all} there{disk}")

    def reading(n: int, n_all: int) -> None:
        say(f"reading weights, {n} of {n_all} tensors there")

    with status.waiting("compiling programs", not quiet) as say:
        wanted = request(options, model.tokenizer)
        runtime.prepare(n_tokens, wanted, progress=compiling)
        runtime.bind(model.wait(reading).decoder)

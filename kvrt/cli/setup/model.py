"""A model by its flags, and one that drafts: the type of its weights, and its compiled programs.

Weights and programs take about as long and do not wait for each other.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax

from kvrt import DraftModel, LayerSkip, Runtime
from kvrt.cli.flags.evaluate import EvalFlags, RunOptions
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import output, startup
from kvrt.cli.setup.config import named_drafter, request, sampling
from kvrt.config import GroupSpec
from kvrt.drafts.drafter import Drafter
from kvrt.errors import BadSession, SessionMismatch, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.options.option import Options
from kvrt.program.disk_hits import CompileProgress
from kvrt.session import OpenedSession
from kvrt_models import hub, load
from kvrt_models.decoder import Decoder
from kvrt_models.load import Opened
from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer.encode import Tokenizer
from kvrt_models.weights.int8_weights import Watch
from kvrt_models.weights.types import WeightType, default_type

# Up to int8, sessions did not name the type; almost all were made by what was the default then.
OF_OLDER: WeightType = "f32"
_SHOWN = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsChoice:
    """The type of a model's matrices.

    Attributes:
      dtype: the type.
      why: in a word or two, where no flag says it; else "".
    """

    dtype: WeightType
    why: str = ""

    def note(self, model: Opened) -> str:
        """For a summary: the type, and which matrices have another."""
        text = self.dtype + (f" ({self.why})" if self.why else "")
        if n := model.weights.as_stored:
            text += f"; {n:,} matri{'x' if n == 1 else 'ces'} as Q8_0 in the file"
        others = model.weights.in_bf16
        if not others:
            return text
        shown = ", ".join(f"{name} ({why})" for name, why in list(others.items())[:_SHOWN])
        more = f" and {len(others) - _SHOWN:,} more" if len(others) > _SHOWN else ""
        return f"{text}; {len(others):,} in bf16 for what int8 would lose: {shown}{more}"


def choose_weights(flag: WeightType | None, opened: OpenedSession | None = None) -> WeightsChoice:
    """The type for a command.

    Args:
      flag: that names it; None leaves it open.
      opened: a session that is resumed.

    Raises:
      SessionMismatch: the flag names another than the session was written with.
      BadSession: its type is none.
    """
    said = None if opened is None else weight_type(opened.path, opened.manifest.fingerprint)
    if flag is None:
        if opened is not None:
            if said is None:
                return WeightsChoice(dtype=OF_OLDER, why="as older sessions")
            return WeightsChoice(dtype=said, why="as the session")
        platform = jax.default_backend()
        return WeightsChoice(dtype=default_type(platform), why=f"default on {platform}")
    if opened is not None and said not in (None, flag):
        raise SessionMismatch(
            f"{opened.path}: the session was written with {said} weights, --dtype {flag} here; "
            "leave --dtype out, or give another session"
        )
    return WeightsChoice(dtype=flag)


def weight_type(path: Path, fingerprint: Mapping[str, Any]) -> WeightType | None:
    """What a session says of its weights; None of one that is older.

    Raises:
      BadSession: it names a type that there is not.
    """
    model = fingerprint.get("model")
    said = model.get("weight_type") if isinstance(model, Mapping) else None
    known = {name: name for name in get_args(WeightType)}
    if said is not None and (not isinstance(said, str) or said not in known):
        raise BadSession(
            f"{path}: written with weights of type {ascii(said)[:40]}, known are "
            f"{', '.join(known)}; update kvrt, or give another session"
        )
    return said  # pyright: ignore[reportReturnType]


def open_with_status(
    options: EvalFlags | BatchOptions, dtype: WeightType, *, quiet: bool
) -> Opened:
    """The model that flags name, fetched with a bar; says what it reads after that.

    On a mesh its weights stay in NumPy.

    Args:
      options: name it, the mesh, and the first tokens that windowed layers go on seeing.
      dtype: of its matrices.
      quiet: nothing is shown.

    Raises:
      UsageError: there is no such model, or there are sinks and no windows.
      BadModelFile: it is damaged.
    """
    path = hub.resolve(options.model, progress=not quiet)
    with output.waiting(f"reading header and tokenizer of {path.name}", not quiet) as say:
        watch = Watch(
            tell=output.warn,
            show=lambda n, n_all: say(f"quantizing weights, {n:,} of {n_all:,}"),
            digest=lambda: say("reading all of the model's file once, for its digest"),
        )
        opened = load.open_model(path, dtype=dtype, on_host=options.mesh is not None, watch=watch)
    if not options.window_sinks:
        return opened
    spec = with_window_sinks(opened.spec, options.window_sinks)
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

    with output.waiting("compiling programs", not quiet) as say:
        wanted = request(options, model.tokenizer)
        runtime.prepare(n_tokens, wanted, progress=compiling(say))
        runtime.bind(model.wait(reading).decoder)


def await_programs(runtime: Runtime, *, quiet: bool) -> None:
    """Waits for what `compile_programs` left: a text does not stop behind its first token."""
    if runtime.programs.n_pending:
        with output.waiting("compiling programs", not quiet) as say:
            runtime.programs.wait(compiling(say))


def compiling(say: output.Say) -> CompileProgress:
    """Says how many programs are there."""

    def show(n: int, n_all: int, n_from_disk: int) -> None:
        disk = f", {n_from_disk} from the disk" if n_from_disk else ""
        say(f"compiling programs, {n:,} of {n_all:,} there{disk}")

    return show


def open_drafter(
    options: RunOptions, model: Opened, config: CacheConfig, n_prompt: int
) -> Drafter | LayerSkip | None:
    """The drafter that the flags ask for, a model with its weights; None without one.

    Args:
      options: the flags.
      model: that it drafts for.
      config: of that model's cache, whose length the drafter's has.
      n_prompt: tokens of the prompt.

    Raises:
      UsageError: there is no such model, it has another vocabulary, or layers are no number.
      KvrtError: memory is lacking for it.
    """
    if options.draft is None:
        return None
    if (named := named_drafter(options.draft)) is not None:
        return named
    other, runtime = open_draft_model(options, options.draft, model, config)
    drafter = DraftModel(runtime=runtime, sampling=sampling(options))
    with output.waiting(f"reading and compiling {other.name}, which drafts", not options.quiet):
        drafter.prepare(n_prompt)
        runtime.bind(other.wait().decoder)
    return drafter


def open_draft_model(
    options: RunOptions | BatchOptions, draft: str, model: Opened, config: CacheConfig
) -> tuple[Opened, Runtime]:
    """Another model that drafts, and its runtime, which has no weights yet.

    Args:
      options: the flags.
      draft: its name.
      model: that it drafts for.
      config: of that model's cache: the drafter's holds as many tokens, and in `kvrt batch`
        sequences.

    Raises:
      UsageError: there is no such model, or it has another vocabulary.
      KvrtError: memory is lacking for it.
    """
    weights = choose_weights(options.dtype)
    named = dataclasses.replace(options, model=draft, mesh=None, window_sinks=0)
    other = open_with_status(named, weights.dtype, quiet=options.quiet)
    if not _same_tokens(model.tokenizer, other.tokenizer):
        raise UsageError(
            f"--draft {draft}: its vocabulary is another than that of {model.name}; give a model "
            "of the same family, ngram or layerskip:E"
        )
    own = CacheConfig(
        n_ctx=config.n_ctx,
        n_ubatch=config.n_ubatch,
        block_size=config.block_size,
        n_seq_max=config.n_seq_max if isinstance(options, BatchOptions) else 1,
        n_rs_seq=options.n_draft + 1 if other.spec.recurrent else 0,
    )
    startup.check_memory(other.spec.groups, own, other.spec.recurrent, widened=other.widened_bytes)
    return other, Runtime(other.shapes, own, identity=other.identity)


def _same_tokens(a: Tokenizer, b: Tokenizer) -> bool:
    if a.digest == b.digest:
        return True
    n = a.n_vocab
    return n == b.n_vocab and all(a.token_bytes(i) == b.token_bytes(i) for i in range(n))

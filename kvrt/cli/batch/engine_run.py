"""Loads the model of `kvrt batch`, makes the engine, and steps until all requests have ended."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrt import DraftModel, Runtime
from kvrt.cli.batch import progress, together
from kvrt.cli.batch.chunks import RequestChunks
from kvrt.cli.batch.requests import RequestEntry, Requests
from kvrt.cli.batch.results import Results
from kvrt.cli.batch.server import AnswerLimits, Compression, Server
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.flags.session_files import BlendFlags
from kvrt.cli.process import output, startup
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.process.startup import choosing
from kvrt.cli.setup.config import (
    cache_config,
    layers_of_spec,
    named_drafter,
    policy_of_batch,
    speculation,
)
from kvrt.cli.setup.model import WeightsChoice, choose_weights, open_draft_model, open_with_status
from kvrt.errors import KvrtError, UsageError
from kvrt.kv_types import described
from kvrt.options.cache import CacheConfig
from kvrt.options.engine import EngineConfig, SessionDir
from kvrt.options.option import flags_of
from kvrt.options.serving import Rules, TierConfig
from kvrt.policies import ScoredPolicy, by_position
from kvrt.serving.engine import Engine
from kvrt.serving.metrics import EngineStats
from kvrt.serving.sizing import budget
from kvrt_models.load import Opened
from kvrt_models.spec import DecoderSpec


def engine_config(options: BatchOptions, identity: Mapping[str, str]) -> EngineConfig:
    """How an engine serves, as the flags ask for it.

    Args:
      options: of batch.
      identity: of the model.

    Raises:
      BadConfig: a value is none that an engine can have.
    """
    return EngineConfig(
        rules=Rules(**options.part(Rules)),
        # A flag that looks further back is meant for every line.
        n_recent=max(options.n_recent, options.repeat_last_n),
        tiers=None if options.host_cache is None else TierConfig(**options.part(TierConfig)),
        sessions=_sessions(options),
        speculation=speculation(options),
        identity=identity,
        **options.part(EngineConfig),
    )


def _sessions(options: BatchOptions) -> SessionDir | None:
    """The folder that requests begin from."""
    if options.session_dir is None:
        return None
    tell = None if options.quiet else output.note
    return SessionDir(tell=tell, **options.part(SessionDir))


_METRICS_S = 5.0  # between two times that --metrics is written


class BatchRun:
    """An engine at work on the requests of a file."""

    def __init__(
        self,
        options: BatchOptions,
        requests: Requests,
        results: Results,
        todo: Sequence[RequestEntry],
    ):
        """Everything that can be refused without the weights is refused here."""
        self._options, self._results = options, results
        self._metrics_clock, self._warned = output.Every(_METRICS_S), False
        # The scheduler weighs priorities of those it knows of; the first of all come first.
        self._todo = deque(sorted(todo, key=lambda e: e.priority))
        self._n_before, self._n_bad = len(results.done), len(requests.bad)
        self._weights = _weights(options)
        self._model = open_with_status(options, self._weights.dtype, quiet=options.quiet)
        self._engine, self._drafter = _open_engine(options, self._model)
        self._prefixes: RequestChunks | Compression | None = None
        self._programs = [self._engine.programs]
        if _name_chunks(options, todo):
            self._prefixes = RequestChunks(options, self._model, self._engine.config)
            self._programs.append(self._prefixes.programs)
        elif options.compresses:
            self._prefixes = Compression(self._engine, self._model.tokenizer)
        extend, n_trained = self._engine.config.self_extend, self._model.spec.n_ctx_train
        policy = policy_of_batch(options, self._model.spec)
        self._server = Server(
            self._engine,
            self._model.tokenizer,
            requests,
            results,
            limits=AnswerLimits(
                n_ctx_train=extend.reach(n_trained) if extend else n_trained,
                config=self._engine.config,
                scored=policy if isinstance(policy, ScoredPolicy) else None,
            ),
            prefixes=self._prefixes,
        )

    def run(self) -> int:
        """Serves all; a signal ends it between two steps.

        Raises:
          KvrtError: an error ended it; results so far are written.
        """
        with contextlib.closing(self._engine):
            self._load()
            return self._serve()

    def _load(self) -> None:
        with output.waiting("reading weights", not self._options.quiet):
            for programs in self._programs:
                programs.bind(self._model.wait().decoder)
            if self._drafter is not None:
                opened, runtime = self._drafter
                runtime.bind(opened.wait().decoder)
                self._programs.append(runtime.programs)

    def _serve(self) -> int:
        counts, quiet = self._server.counts, self._options.quiet
        to_stdout = self._options.output == "-"
        shown = progress.progress_of(len(self._todo), to_stdout=to_stdout)
        hidden = contextlib.nullcontext(lambda counts, stats: None)
        with Interrupt() as interrupt:
            with hidden if quiet else shown as show:
                while (self._todo or self._server.n_live) and not together.any_asks(
                    self._options, interrupt.asked
                ):
                    self._step()
                    show(counts, self._engine.stats)
                    self._refresh_metrics()
            n_left = len(self._todo) + self._server.n_live
            self._tell(n_left)
            if n_left:
                return interrupt.exit_code
            return 1 if self._results.n_failed else 0

    def _refresh_metrics(self) -> None:
        """Writes --metrics anew every few seconds; a failure is a warning, once."""
        if not self._metrics_clock.due():
            return
        try:
            self._write_metrics(self._engine.stats())
        except KvrtError as error:
            if not self._warned:
                output.warn(f"--metrics {error}; the requests go on")
            self._warned = True

    def _write_metrics(self, stats: EngineStats) -> None:
        if self._options.metrics is not None and together.is_first(self._options):
            from kvrt.serving import prometheus  # its library takes time to import

            prometheus.write_metrics(Path(self._options.metrics), stats)

    def _step(self) -> None:
        """One step; counts what it took, and how full the fullest pool was."""
        counts, programs = self._server.counts, self._programs
        compiled, start = self._compile_s, time.perf_counter()
        self._server.feed(self._todo)
        self._server.step()
        counts.compile_s = sum(x.compile_s for x in programs)
        counts.n_compiles = sum(x.n_compiles for x in programs)
        counts.n_from_disk = sum(x.n_from_disk for x in programs)
        counts.seconds += time.perf_counter() - start - (self._compile_s - compiled)
        counts.usage = max(counts.usage, self._engine.usage)

    @property
    def _compile_s(self) -> float:
        """Seconds in which programs were compiled, those for prompts that are compressed too."""
        prefixes = self._prefixes
        own = prefixes.compile_s if isinstance(prefixes, Compression) else 0.0
        return own + sum(x.compile_s for x in self._programs)

    def _tell(self, n_left: int) -> None:
        stats, options = self._engine.stats(), self._options
        if not options.quiet:
            lines = progress.batch_summary(
                self._server.counts,
                stats,
                n_bad=self._n_bad,
                n_before=self._n_before,
                n_left=n_left,
            )
            config = self._engine.config
            lines[3:3] = [
                f"weights    {self._weights.note(self._model)}",
                f"KV dtype   {described(config.type_k, config.type_v)}",
            ]
            lines += self._prefixes.said() if self._prefixes else []
            if options.session_dir is not None:
                folder = Path(options.session_dir)
                lines += progress.session_lines(stats, folder, self._engine.fingerprint)
            output.note("\n".join(lines))
        if options.stats:
            output.note(progress.metrics_table(stats).rstrip("\n"))
        self._write_metrics(stats)


def _name_chunks(options: BatchOptions, todo: Sequence[RequestEntry]) -> bool:
    """Whether a line names chunks; raises UsageError where they cannot be served."""
    if any(entry.has_chunks for entry in todo):
        if not options.prefix_cache:
            raise UsageError(
                "lines of -i name chunks, which are put into the prefix cache; leave out "
                "--noprefix_cache"
            )
        return True
    unused = sorted({f.name for f in flags_of(BlendFlags)} & options.given)
    if unused:
        output.warn(f"no line that is to be served names chunks; --{unused[0]} does nothing")
    return False


def _weights(options: BatchOptions) -> WeightsChoice:
    """The type of the weights, which is settled by now, and why."""
    default = choose_weights(None)
    if "dtype" in options.given or options.dtype in (None, default.dtype):
        return choose_weights(options.dtype) if "dtype" in options.given else default
    return WeightsChoice(dtype=options.dtype, why="as the results that are there")


def _open_engine(
    options: BatchOptions, model: Opened
) -> tuple[Engine, tuple[Opened, Runtime] | None]:
    """An engine without weights, except where blocks on a disk are named by the weights.

    With it a model that drafts, and its runtime, if the flags name one.
    """
    spec, mesh = model.spec, startup.mesh(options)
    config = cache_config(options, spec.n_ctx_train)
    serving = engine_config(options, model.identity).fitted(config)
    policy = policy_of_batch(options, spec)
    config = _sized(options, spec, config, serving)
    layers = layers_of_spec(spec, config, policy)
    startup.check_memory(
        layers.groups,
        layers.config,
        layers.recurrent,
        paged=options.mode == "paged",
        mesh=mesh,
        widened=model.widened_bytes,
    )
    drafter = None
    if serving.speculation and options.draft and named_drafter(options.draft) is None:
        drafter = open_draft_model(options, options.draft, model, config)
        drafts = dataclasses.replace(serving.speculation, drafter=DraftModel(runtime=drafter[1]))
        serving = dataclasses.replace(serving, speculation=drafts)
    decoder = model.wait().decoder if options.disk_cache else model.shapes
    with choosing(config.attention, quiet=options.quiet):
        return Engine(decoder, config, serving, mesh=mesh, policy=policy), drafter


def _sized(
    options: BatchOptions, spec: DecoderSpec, config: CacheConfig, serving: EngineConfig
) -> CacheConfig:
    """The config for a budget, which is said."""
    if serving.budget_bytes is None:
        return config
    policy = policy_of_batch(options, spec)
    layers, drops = layers_of_spec(spec, config, policy), by_position(policy)
    of = layers.groups, layers.recurrent
    sized = budget.fit_budget(*of, layers.config, serving, drops)
    if not options.quiet:
        became = budget.budget_line(*of, sized, serving, drops)
        output.note(f"budget     {options.budget}: {became}")
    return dataclasses.replace(config, n_ctx=sized.n_ctx)

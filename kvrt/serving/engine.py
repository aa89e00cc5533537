"""Many requests on one cache: added at any time, computed together, reported step by step."""

import time
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from flax import nnx

from kvrt.arrays import Array, Float
from kvrt.cells.slots import pad
from kvrt.config import CacheConfig
from kvrt.errors import BadRequest, warn_renamed
from kvrt.exclusive import Exclusive, Guarded, one_call_at_a_time
from kvrt.policies import Policy
from kvrt.program.batch import Batch
from kvrt.program.mesh import MeshSpec, placement
from kvrt.program.programs import Programs
from kvrt.program.sample import NO_TOKEN
from kvrt.serving.cache.opening import open_space
from kvrt.serving.config import EngineConfig, from_keywords
from kvrt.serving.contexts import contexts_of
from kvrt.serving.metrics import EngineStats, Metrics, as_metrics, device_counts
from kvrt.serving.offload import Tiers
from kvrt.serving.outputs import Outputs
from kvrt.serving.request import Limits, Output, Request, SeqState, samples_of
from kvrt.serving.samplers import Samplers
from kvrt.serving.scheduling.scheduler import Scheduler
from kvrt.serving.scheduling.step_plan import StepPlan
from kvrt.serving.sessions.engine_sessions import EngineSessions
from kvrt.serving.step_batch import StepBatch, step_batch
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import Snapshot


@one_call_at_a_time(
    free=("programs", "running", "has_work", "stats", "metrics", "usage", "tiers", "fingerprint"),
)
class Engine:
    """A model that serves requests, in cells or in blocks.

        engine = Engine(model, CacheConfig(n_ctx=4096, n_seq_max=16, block_size=16))
        engine.add_request(Request(id="a", tokens=prompt, n_predict=100))
        while engine.has_work:
            for output in engine.step():
                ...

    A request that cannot be served is refused alone; the others are not touched.

    It takes one call at a time, and one item of `stream` or `generate` is a call: `add_request`,
    `cancel`, `step`, `logits`, `close` or another item meanwhile, of any thread, raise `Busy` and
    change nothing. `stats` (and `metrics`, its old name), `usage`, `has_work`, `running`,
    `programs`, `fingerprint` and `tiers` may be looked at any time. A server hands what its threads
    are asked to the one that steps, by a queue.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: CacheConfig,
        options: EngineConfig | None = None,
        *,
        mesh: MeshSpec | None = None,
        policy: Policy | None = None,
        **old: Any,
    ):
        """Allocates the cache; nothing is compiled before it is needed.

        Args:
          model: a `kvrt.attention.Decoder`.
          config: n_ctx tokens of n_seq_max sequences together; in blocks of block_size.
          options: how they are served; None is `EngineConfig()`.
          mesh: devices that divide cache and weights; None is one.
          policy: what a request keeps when it outgrows its context, n_ctx_seq of the rules, unless
            it names a policy of its own; None refuses requests that could.
          **old: fields of `options`, as keyword arguments up to 0.1.

        Raises:
          BadConfig: the config asks for what an engine does not do, rules do not fit it, or there
            are too few devices.
        """
        self._exclusive = Exclusive("Engine")
        self.options = from_keywords(options, old).fitted(config)
        place, divided = placement(mesh, config)
        self.device, self.space = open_space(model, divided, self.options, place, policy)
        self.config = self.device.settled(config)
        rules = self.options.rules
        assert rules is not None, "fitted options have rules"
        self._n_batch = rules.n_batch
        n_vocab: int = model.n_vocab  # pyright: ignore[reportAttributeAccessIssue]
        n_max = min(self.space.n_max, rules.n_ctx_seq or config.n_ctx)
        self._limits = Limits(n_vocab=n_vocab, n_ctx=config.n_ctx, n_max=n_max)
        layout = self.device.layout
        self._contexts = contexts_of(policy, self.config, layout, self.space, n_max)
        self._sessions = EngineSessions(model, self.device, self.space, self.options)
        self._scheduler = Scheduler(self.space, rules)
        self._samplers = Samplers(config.n_seq_max, self.options.n_recent)
        self._metrics = Metrics(self.space.residency)
        self._outputs = Outputs()
        # What the newest tokens were sampled from, and the samples that they are of, in order.
        self._logits: Array | None = None
        self._sampled: Sequence[SeqState] = ()

    @property
    def programs(self) -> Programs:
        """What was compiled so far."""
        return self.device.programs

    @property
    def running(self) -> Sequence[SeqState]:
        """Samples that run, in the order in which they were admitted; not to be changed."""
        return self._scheduler.running

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        return bool(self._scheduler.live or self._outputs.n_pending)

    def add_request(self, request: Request) -> None:
        """Takes a request, to be computed from the next step on.

        Raises:
          BadRequest: it can never be served here; nothing else is touched.
        """
        self._add(request)

    def cancel(self, request_id: str, sample: int | None = None) -> None:
        """Ends a request at once, or one of its samples; the next step reports it.

        Raises:
          BadRequest: nothing of that is being served.
        """
        ended = self._scheduler.cancel(request_id, sample)
        self._outputs.add(self._output(state) for state in ended)

    def step(self) -> list[Output]:
        """Computes the next tokens of as many requests as fit; what is new.

        What is new of a request that is being streamed goes to its stream instead.
        """
        return self._outputs.divide(self._step())

    def generate(self, request: Request) -> Guarded[Output]:
        """Takes a request and yields its outputs: `add_request`, then `stream`.

        Raises:
          BadRequest: it can never be served here; nothing else is touched.
        """
        self._add(request)
        return Guarded(self._exclusive, "generate", self._stream(request.id))

    def stream(self, request_id: str) -> Guarded[Output]:
        """Steps until a request has ended, and yields its outputs.

        It yields all that are made from its first step on, whoever calls `step` meanwhile, and ends
        when all samples have ended, by `cancel` or another caller's step as well. Outputs of other
        requests come with the next `step` of somebody else; so does the rest of this one's if the
        iterator is closed early.

        Raises:
          BadRequest: no such request is being served, or it has a stream already.
        """
        return Guarded(self._exclusive, "stream", self._stream(request_id))

    def logits(self, request_id: str, sample: int = 0) -> Float[Array, " V"]:
        """What the token was sampled from that the last step reported of a sample, float32.

        Raises:
          BadRequest: it reported none.
        """
        wanted = (request_id, sample)
        for i, state in enumerate(self._sampled):
            if (state.request.id, state.sample) == wanted and self._logits is not None:
                return self._logits[i]
        raise BadRequest(f"the last step sampled nothing for request {request_id!r}, {sample}")

    @property
    def fingerprint(self) -> Fingerprint:
        """What a session must share with this engine to be loaded, as of a `Runtime`.

        Raises:
          BadConfig: the model has only shapes so far.
        """
        return self._sessions.fingerprint

    def save(self, what: str | Sequence[int], sample: int = 0, *, salt: bytes = b"") -> Snapshot:
        """What the prefix cache has of a text, for `kvrt.session.save`; steps do not change it.

        A `Runtime` resumes such a session as well as an engine.

        Args:
          what: tokens; or the id of a request that is being served, whose tokens so far they are.
          sample: which of its samples.
          salt: of the requests that computed the tokens, where they are given.

        Raises:
          BadConfig: there is no prefix cache.
          BadRequest: no such request is being served.
          UsageError: the prefix cache has nothing of the text, not even a block.
        """
        if not isinstance(what, str):
            return self._sessions.save(what, salt)
        states = [s for s in self._scheduler.live.get(what, ()) if s.sample == sample]
        if not states:
            raise BadRequest(
                f"request {what!r}, sample {sample}, is not being served; give its tokens"
            )
        return self._sessions.save(states[0].as_computed, states[0].request.salt)

    def load(
        self,
        snapshot: Snapshot,
        sequences: Sequence[int] | None = None,
        *,
        salt: bytes = b"",
        convert: bool = False,
    ) -> dict[int, int]:
        """Puts a session into the prefix cache, where requests with the same tokens find it.

        In paged mode whole blocks go there, by the chain of hashes of the session's tokens, in cell
        mode all; none of what a policy has moved. What is cached already stays as it is. Nobody
        holds what is loaded: it is evicted as all else.

        Args:
          snapshot: from `kvrt.session.read`, of an engine or a `Runtime`.
          sequences: which; None is all.
          salt: of the requests that may find them.
          convert: keys and values are converted to this cache's KV dtype.

        Returns:
          By sequence, tokens of the longest hit that it gives.

        Raises:
          SessionMismatch: it is of another model or cache, or lacks what a hit needs.
          BadSequence: a sequence is not in it.
          CacheFull: there are too few free blocks.
          BadConfig: there is no prefix cache.
          UsageError: a value has no finite counterpart in this cache's KV dtype.
        """
        return self._sessions.load(snapshot, sequences, salt, convert=convert)

    def stats(self) -> EngineStats:
        """Counters so far, which `kvrt.serving.prometheus` can write."""
        return self._snapshot()

    def metrics(self) -> dict[str, Any]:
        """`stats` as a dictionary, with the names of 0.1."""
        warn_renamed("Engine.metrics", "call Engine.stats")
        return as_metrics(self._snapshot())

    @property
    def usage(self) -> float:
        """How full the fullest pool, or group's cells, is; cheaper than `metrics`."""
        return self.space.usage

    @property
    def tiers(self) -> Tiers | None:
        """Where blocks go beyond the device, if anywhere."""
        return self.space.tiers

    def __enter__(self) -> "Engine":
        """The engine, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Ends what works in the background; the engine is not to be used any more."""
        if self.tiers:
            self.tiers.close()

    def _add(self, request: Request) -> None:
        context = self._contexts.of(request)
        self._limits.check(request, self._scheduler.live, context)
        if self._outputs.is_streaming(request.id):
            raise BadRequest(
                f"{request.name} ended, and its stream is not read to the end; read or close it, "
                "or give another id"
            )
        self._samplers.check(request)
        for state in samples_of(request, context, self._contexts.extend_of(request)):
            self._scheduler.add(state)

    def _step(self) -> list[Output]:
        outputs = self._outputs.take()
        self.space.begin_step()
        plan = self._scheduler.plan()
        outputs += map(self._output, plan.refused)
        self._sampled = ()
        if not plan.n_tokens:
            if self.tiers and not outputs:
                self.tiers.wait()
            return outputs
        self._metrics.planned(plan)
        start = time.perf_counter()
        step = step_batch(plan, self.config.n_seq_max, self._n_batch)
        states = [*plan.ending, *(dst for _, dst in plan.forks)]
        tokens = self._run(step, plan, states)
        self.space.commit(step)
        self._scheduler.ran(plan)
        self._metrics.ran(plan, len(states))
        if self.tiers and step.prompts:
            self.tiers.computed(step.tokens.size, time.perf_counter() - start)
        return outputs + self._taken(states, tokens.tolist())

    def _run(self, step: StepBatch, plan: StepPlan, states: list[SeqState]) -> np.ndarray:
        """Runs a step; the next token of each of some samples."""
        places, recurrent = self.space.place(step)
        wanted = range(len(states))  # where all decode
        if step.prompts or plan.forks:
            last, parent = step.last(), {dst: src for src, dst in plan.forks}
            wanted = [last[parent.get(s, s)] for s in states]
        batch = Batch(
            tokens=step.spread(step.tokens, 0),
            pos=step.spread(step.pos, -1),
            seq_ids=step.spread(step.seq_ids, -1),
            places=places,
            states=recurrent,
            out_ids=pad(wanted, self.config.n_seq_max, 0),
        )
        tokens, self._logits = self.device.serve(batch, self._samplers.sampler(states))
        self._sampled = states
        return tokens

    def _taken(self, states: Sequence[SeqState], tokens: list[int]) -> list[Output]:
        """Appends sampled tokens, which may end their samples; what there is to report."""
        outputs = []
        for state, token in zip(states, tokens, strict=False):
            if state.seq_id is None:
                continue  # a fork that found no room is computed by itself later on
            if token == NO_TOKEN:
                outputs.append(self._without_token(state))
                continue
            reason = state.append(token)
            if reason is None:
                n_cached, n_dropped = state.n_cached or 0, state.n_dropped
                goes_on = (
                    state.request.id,
                    state.sample,
                    (token,),
                    None,
                    n_cached,
                    None,
                    n_dropped,
                )
                outputs.append(Output(*goes_on))
            else:
                self._scheduler.finish(state, reason)
                outputs.append(self._output(state, token))
        return outputs

    def _without_token(self, state: SeqState) -> Output:
        """Ends a sample of whose logits no token can be sampled; what there is to report."""
        self._metrics.bad_logits()
        error = (
            f"{state.request.name}: the logits of its token at position "
            f"{state.n_past - 1} have NaN, +inf or no finite value, so there is no next token; "
            "the weights, or the cached keys and values before it, are damaged: check the model"
        )
        self._scheduler.finish(state, "error", error, damaged=True)
        return self._output(state)

    def _output(self, state: SeqState, *tokens: int) -> Output:
        """What there is to report of a sample, ended or not."""
        if state.finish_reason is not None:
            self._metrics.finished(state)
        return Output(
            id=state.request.id,
            sample=state.sample,
            tokens=tokens,
            finish_reason=state.finish_reason,
            n_cached=state.n_cached or 0,
            error=state.error,
            n_dropped=state.n_dropped,
        )

    def _stream(self, request_id: str) -> Generator[Output, None, None]:
        if not self._has_outputs(request_id):
            raise BadRequest(f"request {request_id!r} is not being served; add it first")
        mine = self._outputs.open(request_id)
        try:
            while mine or self._has_outputs(request_id):
                if not mine:
                    others = self._outputs.divide(self._step())
                    self._outputs.add(others)
                while mine:
                    yield mine.popleft()
        finally:
            self._outputs.close(request_id)

    def _has_outputs(self, request_id: str) -> bool:
        """Whether a step will report something of a request, sooner or later."""
        return request_id in self._scheduler.live or self._outputs.is_pending(request_id)

    def _snapshot(self) -> EngineStats:
        return self._metrics.snapshot(
            n_running=len(self._scheduler.running),
            n_waiting=self._scheduler.n_waiting,
            pools=tuple(self.space.pool_use()),
            checkpoints=self.space.checkpoint_use,
            tiers=self.tiers.report() if self.tiers else {},
            **device_counts(self.device),
        )

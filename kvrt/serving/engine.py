"""Many requests on one cache: added at any time, computed together, reported step by step."""

import dataclasses
from collections.abc import Generator, Sequence
from typing import Literal

from jax.sharding import Mesh

from kvrt.arrays import Array, Float
from kvrt.attention.contract import Decoder
from kvrt.cache import checks
from kvrt.drafts.layer_skip import LayerSkip
from kvrt.errors import BadRequest
from kvrt.exclusive import Exclusive, Guarded, one_call_at_a_time
from kvrt.options.cache import CacheConfig
from kvrt.options.engine import EngineConfig
from kvrt.options.sampling import Sampling
from kvrt.policies import AnyPolicy, Schedule, by_position
from kvrt.program.mesh import MeshSpec
from kvrt.program.programs import Programs
from kvrt.program.rounds.layer_skip import check_exit
from kvrt.serving.cache.opening import open_space
from kvrt.serving.contexts import contexts_of
from kvrt.serving.limits import Limits
from kvrt.serving.metrics import EngineStats
from kvrt.serving.offload import Tiers
from kvrt.serving.outputs import Output, Outputs
from kvrt.serving.request import Request, SeqState, samples_of
from kvrt.serving.scheduling.agreement import agreement_for
from kvrt.serving.sessions.engine_sessions import EngineSessions
from kvrt.serving.sessions.pins import Pin, Pins
from kvrt.serving.steps import EngineSteps
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import Snapshot


@one_call_at_a_time(
    free=("programs", "running", "has_work", "stats", "usage", "tiers", "fingerprint"),
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
        model: Decoder,
        config: CacheConfig,
        options: EngineConfig | None = None,
        *,
        mesh: MeshSpec | Mesh | None = None,
        policy: AnyPolicy | None = None,
    ):
        """Allocates the cache; nothing is compiled before it is needed.

        Args:
          model: a flax.nnx module, as `kvrt.Decoder` says.
          config: n_ctx tokens of n_seq_max sequences together; in blocks of block_size.
          options: how they are served; None is `EngineConfig()`.
          mesh: devices that divide cache and weights, as for a `Runtime`; None is one. Where they
            are of several processes each makes the same calls; a step in which they plan
            differently raises KvrtError in all of them.
          policy: what a request keeps when it outgrows its context, n_ctx_seq of the rules, unless
            it names a policy of its own; None refuses requests that could. One by score is that of
            all requests.

        Raises:
          BadConfig: the config asks for what an engine does not do, rules do not fit it, there are
            too few devices, or several processes with tiers or a folder of sessions.
        """
        self._exclusive = Exclusive("Engine")
        config = checks.settled(model, config, policy)
        self.options = (options or EngineConfig()).fitted(config)
        agreement = agreement_for(self.options, on_mesh=mesh is not None)
        self.device, self.space, config = open_space(model, config, self.options, mesh, policy)
        self.config = self.device.settled(config)
        rules = self.options.rules
        assert rules is not None, "fitted options have rules"
        n_vocab: int = model.n_vocab
        n_max = min(self.space.n_max, rules.n_ctx_seq or config.n_ctx)
        if self.options.speculation is not None:
            of = self.device
            checks.drafts(self.options.speculation, config, of.layout, n_vocab)
            if isinstance(drafter := self.options.speculation.drafter, LayerSkip):
                check_exit(of.programs, drafter.exit_layer)
        self._limits = Limits(n_vocab=n_vocab, n_ctx=config.n_ctx, n_max=n_max)
        layout = self.device.layout
        self._contexts = contexts_of(by_position(policy), self.config, layout, self.space, n_max)
        self._sessions = EngineSessions(model, self.device, self.space, self.options, policy)
        self._steps = EngineSteps(self.device, self.space, self.options, agreement)
        self._scheduler = self._steps.scheduler
        self._pins = Pins(self.space, self.options)
        self._outputs = Outputs()

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

    def fork(
        self, request_id: str, fork_id: str, *, sample: int = 0, sampling: Sampling | None = None
    ) -> int:
        """Continues a sample under another id as well; they share what they have so far.

        The fork is as a sample that was there from the beginning and sampled the same tokens: they
        count for n_predict, its repeat penalty and its random numbers. Its outputs have what comes.

        Args:
          request_id: of a request that is being served.
          fork_id: of the new request.
          sample: which of the samples.
          sampling: how the fork is sampled from now on; None is as the sample.

        Returns:
          Tokens that it does not compute again: 0 where there is no room now, so that it waits.

        Raises:
          BadRequest: no such sample is being served, it is of a beam search, or the id is taken.
          CacheFull: there is no room, and the policy dropped tokens, so it cannot be recomputed.
        """
        self._steps.beams.check_no_search(request_id, sample)
        src = self._scheduler.find(request_id, sample)
        sampling = sampling or src.sampling
        request = dataclasses.replace(src.request, id=fork_id, n=1, sampling=sampling)
        dst = src.forked(request, 0)
        self._check(dst.request, dst.schedule)
        n = self._scheduler.fork(src, dst)
        self._steps.metrics.forked(n > 0)
        return n

    def cancel(
        self,
        request_id: str,
        sample: int | None = None,
        *,
        reason: Literal["cancelled", "stop"] = "cancelled",
    ) -> None:
        """Ends a request at once, or one of its samples; the next step reports it.

        Args:
          request_id: of the request.
          sample: which of its samples; None is all.
          reason: counted and reported; "stop" where the caller has found a stop text.

        Raises:
          BadRequest: nothing of that is being served, or it is one beam of a search.
        """
        self._steps.beams.check_no_search(request_id, sample)
        self._outputs.add(self._steps.report(self._scheduler.cancel(request_id, sample, reason)))

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

    def logits(self, request_id: str, sample: int = 0, index: int = -1) -> Float[Array, " V"]:
        """What a token was sampled from that the last step reported of a sample, float32.

        Args:
          request_id: of the request.
          sample: which of its samples.
          index: which token of those that the step reported, several where drafts were accepted.

        Raises:
          BadRequest: it reported none.
        """
        return self._steps.logits(request_id, sample, index)

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
        state = self._scheduler.find(what, sample, "give its tokens")
        return self._sessions.save(self._sessions.shared(state), state.request.salt)

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

    def pin(self, what: str | Sequence[int], sample: int = 0, *, salt: bytes = b"") -> Pin:
        """Keeps what the prefix cache has of a text until it is unpinned, whoever needs room.

        Args:
          what: tokens; or the id of a request that is being served, whose tokens so far they are.
          sample: which of its samples.
          salt: of the requests that find it, where tokens are given.

        Returns:
          The pin, for `unpin`; its tokens are those that are kept, as many as there were.

        Raises:
          BadConfig: there is no prefix cache.
          BadRequest: no such request is being served.
          CacheFull: so much is pinned or reserved that this would take others' room.
          UsageError: the prefix cache has nothing of the text, not even a block.
        """
        if isinstance(what, str):
            state = self._scheduler.find(what, sample, "give its tokens")
            what, salt = self._sessions.shared(state), state.request.salt
        return self._pins.pin(what, salt)

    def unpin(self, pin: Pin) -> None:
        """Lets a prefix be evicted again, when its room is needed.

        Raises:
          UsageError: it is not pinned here.
        """
        self._pins.unpin(pin)

    def stats(self) -> EngineStats:
        """Counters so far, which `kvrt.serving.prometheus` can write."""
        return self._snapshot()

    @property
    def usage(self) -> float:
        """How full the fullest pool, or group's cells, is; cheaper than `stats`."""
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
        schedule = self._contexts.of(request)
        request = self._sessions.private(request, schedule)
        self._check(request, schedule)
        sparse = self.config.select is not None
        self._steps.add(samples_of(request, schedule, reads_sparsely=sparse))

    def _check(self, request: Request, schedule: Schedule | None) -> None:
        """Refuses a new request that cannot be served; raises BadRequest."""
        drops = schedule is not None and schedule.drops
        self._limits.check(request, self._scheduler.live, drops=drops)
        if self._outputs.is_streaming(request.id):
            raise BadRequest(
                f"{request.name} ended, and its stream is not read to the end; read or close it, "
                "or give another id"
            )
        self._steps.samplers.check(request)

    def _step(self) -> list[Output]:
        outputs = self._outputs.take()
        return outputs + self._steps.step(waits=not outputs)

    def _stream(self, request_id: str) -> Generator[Output, None, None]:
        return self._outputs.stream(request_id, self._scheduler.live, self._step)

    def _snapshot(self) -> EngineStats:
        return self._steps.snapshot(n_pins=len(self._pins))

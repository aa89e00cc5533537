"""Many requests on one cache: added at any time, computed together, told as they come."""

import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Literal

import numpy as np
from flax import nnx

from kvrt.arrays import Array, Float
from kvrt.cellcache.planning import Host
from kvrt.config import CacheConfig, GroupSpec, RecurrentSpec
from kvrt.errors import BadConfig, BadRequest
from kvrt.exclusive import Exclusive, Guarded, one_call_at_a_time
from kvrt.kv_types import any_by_channel
from kvrt.paged.layout.groups import group_layers, layer_caches
from kvrt.paged.layout.sizing import for_tokens
from kvrt.program.batch import Batch, pad
from kvrt.program.device import Device
from kvrt.program.layout import cell_layout, paged_layout
from kvrt.program.mesh import MeshSpec, placement
from kvrt.program.programs import Programs
from kvrt.program.sample import NO_TOKEN
from kvrt.serving import request as requests
from kvrt.serving.cache.cells import CellSpace
from kvrt.serving.cache.paged import PagedSpace
from kvrt.serving.metrics import Metrics
from kvrt.serving.offload import TierConfig, Tiers
from kvrt.serving.request import Limits, Output, Request, State
from kvrt.serving.samplers import Draws
from kvrt.serving.scheduler import Scheduler
from kvrt.serving.step_batch import Work, work
from kvrt.serving.step_plan import Rules, StepPlan

Mode = Literal["cell", "paged"]


@one_call_at_a_time(free=("programs", "running", "has_work", "metrics", "usage", "tiers"))
class Engine:
    """A model that serves requests, in cells or in blocks.

        engine = Engine(model, CacheConfig(n_ctx=4096, n_seq_max=16, block_size=16))
        engine.add_request(Request(id="a", tokens=prompt, n_predict=100))
        while engine.has_work:
            for output in engine.step():
                ...

    A request that cannot be served is refused alone; the others go on.

    It takes one call at a time, and one item of `stream` is a call: `add_request`, `cancel`,
    `step`, `logits`, `close` or another `stream` meanwhile, of any thread, raise `Busy` and change
    nothing. `metrics`, `usage`, `has_work`, `running`, `programs` and `tiers` may be looked at any
    time. A server hands what its threads are asked to the one that steps, by a queue.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: CacheConfig,
        *,
        mode: Mode = "paged",
        rules: Rules | None = None,
        caching: bool = True,
        hash_block_size: int | None = None,
        n_recent: int = 64,
        tiers: TierConfig | None = None,
        mesh: MeshSpec | None = None,
    ):
        """Allocates the cache; nothing is compiled before it is needed.

        Args:
          model: a `kvrt.attention.Decoder`.
          config: n_ctx tokens of n_seq_max sequences together; in blocks of block_size.
          mode: "paged" shares what requests have in common, "cell" takes whatever is empty.
          rules: how the scheduler decides; None is first come, first served, n_ubatch a step.
          caching: in paged mode, whether requests find what others computed.
          hash_block_size: in paged mode, tokens that a hit may end at a multiple of, within a block
            that is then copied; None is whole blocks.
          n_recent: tokens that a repeat penalty may look back.
          tiers: in paged mode, where blocks go beyond the device; call `close` in the end.
          mesh: devices that divide cache and weights; None is one.

        Raises:
          BadConfig: the config asks for what an engine does not do, rules do not fit it, or there
            are too few devices.
        """
        self._exclusive = Exclusive("Engine")
        rules = rules or Rules(n_batch=config.n_ubatch)
        _check(config, rules, mode, tiers)
        if hash_block_size is not None and mode == "cell":
            raise BadConfig("hash_block_size is for hits, and cell mode has none; use mode='paged'")
        groups: tuple[GroupSpec, ...] = model.groups  # pyright: ignore[reportAttributeAccessIssue]
        recurrent: RecurrentSpec | None
        recurrent = model.recurrent  # pyright: ignore[reportAttributeAccessIssue]
        place, config = placement(mesh, config)
        self.config, self.mode, self._rules = config, mode, rules
        if mode == "cell":
            self.device = Device(model, config, cell_layout(groups, recurrent, config), place)
            self.space = CellSpace(Host(groups, recurrent, config), self.device, config)
        else:
            plan = for_tokens(
                group_layers(layer_caches(groups, recurrent, config)),
                n_tokens=config.n_ctx,
                n_seq=config.n_seq_max,
                n_inflight=rules.n_batch,
            )
            layout, group_of = paged_layout(groups, recurrent, plan, config)
            self.device = Device(model, config, layout, place)
            layout = self.device.programs.layout
            self.space = PagedSpace(
                plan,
                layout,
                group_of,
                self.device,
                config,
                n_batch=rules.n_batch,
                n_ctx_seq=rules.n_ctx_seq,
                caching=caching,
                hash_block_size=hash_block_size,
                tiers=tiers,
                fingerprint=self._fingerprint() if tiers and tiers.disk else b"",
            )
        n_vocab: int = model.n_vocab  # pyright: ignore[reportAttributeAccessIssue]
        n_max = min(self.space.n_max, rules.n_ctx_seq or config.n_ctx)
        self._limits = Limits(n_vocab=n_vocab, n_ctx=config.n_ctx, n_max=n_max)
        self._scheduler = Scheduler(self.space, rules)
        self._draws = Draws(config.n_seq_max, n_recent)
        blocks = self.space.residency if isinstance(self.space, PagedSpace) else None
        self._metrics = Metrics(blocks)
        # What the newest tokens were drawn from, and the row of it by request and sample.
        self._logits: Array | None = None
        self._drawn: dict[tuple[str, int], int] = {}
        # Outputs that were made while somebody looked at another request's.
        self._untold: list[Output] = []
        # Outputs of requests that are being streamed, until their streams yield them.
        self._streams: dict[str, deque[Output]] = {}

    @property
    def programs(self) -> Programs:
        """What was compiled so far."""
        return self.device.programs

    @property
    def running(self) -> Sequence[State]:
        """Samples that have a row, in the order in which they got it; not to be changed."""
        return self._scheduler.running

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or tell anything."""
        return bool(self._scheduler.live or self._untold)

    def add_request(self, request: Request) -> None:
        """Takes a request, to be computed from the next step on.

        Raises:
          BadRequest: it can never be served here; nothing else is touched.
        """
        self._limits.check(request, self._scheduler.live)
        if request.id in self._streams:
            raise BadRequest(
                f"{request.name} ended, and its stream is not read to the end; read or close it, "
                "or give another id"
            )
        self._draws.check(request)
        for state in requests.begin(request):
            self._scheduler.add(state)

    def cancel(self, request_id: str, sample: int | None = None) -> None:
        """Ends a request at once, or one of its samples; the next step tells so.

        Raises:
          BadRequest: nothing of that is being served.
        """
        for state in self._scheduler.cancel(request_id, sample):
            self._untold.append(self._ended(state))

    def step(self) -> list[Output]:
        """Computes the next tokens of as many requests as fit, and tells what is new.

        What is new of a request that is being streamed goes to its stream instead.
        """
        return self._to_streams(self._step())

    def _step(self) -> list[Output]:
        told, self._untold = self._untold, []
        self.space.begin()
        plan = self._scheduler.plan()
        told += [self._ended(s) for s in plan.refused]
        self._drawn = {}
        if not plan.n_tokens:
            if self.tiers and not told:
                self.tiers.wait()
            return told
        self._metrics.planned(plan)
        start = time.perf_counter()
        step = work(plan, self.config.n_seq_max, self._rules.n_batch)
        drawers = [*plan.ending, *(dst for _, dst in plan.forks)]
        tokens = self._run(step, plan, drawers)
        self.space.wrote(step)
        self._scheduler.ran(plan)
        self._metrics.ran(plan, len(drawers))
        if self.tiers and step.prompts:
            self.tiers.computed(step.tokens.size, time.perf_counter() - start)
        # Samples that found no row to part into are computed by themselves later on.
        for state, token in zip(drawers, tokens.tolist(), strict=False):
            if state.row is None:
                continue
            if token == NO_TOKEN:
                told.append(self._failed(state))
                continue
            reason = state.take(token)
            if reason is None:
                n = state.n_cached or 0
                told.append(Output(state.request.id, state.sample, (token,), None, n))
            else:
                self._scheduler.finish(state, reason)
                told.append(self._ended(state, token))
        return told

    def stream(self, request_id: str) -> Guarded[Output]:
        """Steps until a request has ended, and yields what is told of it.

        It yields all that is told from its first step on, whoever calls `step` meanwhile, and ends
        when all samples have ended, by `cancel` or another caller's step as well. What is told of
        other requests comes with the next `step` of somebody else; so does the rest of this one's
        if the iterator is closed early.

        Raises:
          BadRequest: no such request is being served, or it has a stream already.
        """
        return Guarded(self._exclusive, "stream", self._stream(request_id))

    def _stream(self, request_id: str) -> Generator[Output, None, None]:
        if not self._has_news(request_id):
            raise BadRequest(f"request {request_id!r} is not being served; add it first")
        if request_id in self._streams:
            raise BadRequest(f"request {request_id!r} is being streamed already; read that one")
        mine = self._streams[request_id] = deque()
        try:
            while mine or self._has_news(request_id):
                if not mine:
                    told = self._to_streams(self._step())
                    self._untold += told
                while mine:
                    yield mine.popleft()
        finally:
            del self._streams[request_id]
            self._untold = [*mine, *self._untold]

    def _to_streams(self, told: list[Output]) -> list[Output]:
        """Gives streams what is told of their requests; the rest."""
        for output in told if self._streams else ():
            if output.id in self._streams:
                self._streams[output.id].append(output)
        return [x for x in told if x.id not in self._streams]

    def _has_news(self, request_id: str) -> bool:
        """Whether a step would tell something of a request, sooner or later."""
        return request_id in self._scheduler.live or any(x.id == request_id for x in self._untold)

    def logits(self, request_id: str, sample: int = 0) -> Float[Array, " V"]:
        """What the token was drawn from that the last step told of a sample, float32.

        Raises:
          BadRequest: it told none.
        """
        row = self._drawn.get((request_id, sample))
        if row is None or self._logits is None:
            raise BadRequest(f"the last step drew nothing for request {request_id!r}, {sample}")
        return self._logits[row]

    def metrics(self) -> dict[str, Any]:
        """Counters so far; see `serving.metrics`, which `serving.prometheus` can write."""
        return self._metrics.report(
            n_running=len(self._scheduler.running),
            n_waiting=self._scheduler.n_waiting,
            pools=self.space.pool_use(),
            tiers=self.tiers.report() if self.tiers else None,
        )

    @property
    def usage(self) -> float:
        """How full the fullest pool, or group's cells, is; cheaper than `metrics`."""
        return self.space.usage

    @property
    def tiers(self) -> Tiers | None:
        """Where blocks go beyond the device, if anywhere."""
        return self.space.tiers if isinstance(self.space, PagedSpace) else None

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

    def _fingerprint(self) -> bytes:
        """What blocks of another run must share to be believed."""
        config = self.config
        said = (config.type_k, config.type_v, config.hadamard)
        said += (config.rope, config.block_size, config.n_ctx)
        return f"{self.programs.weights_digest} {said} {self.programs.layout.groups}".encode()

    def _run(self, step: Work, plan: StepPlan, drawers: list[State]) -> np.ndarray:
        places, states = self.space.places(step)
        last, parent = step.last(), {dst: src for src, dst in plan.forks}
        wanted = [last[parent.get(s, s)] for s in drawers]
        batch = Batch(
            tokens=step.spread(step.tokens, 0),
            pos=step.spread(step.pos, -1),
            seq_ids=step.spread(step.rows, -1),
            places=places,
            states=states,
            out_ids=pad(wanted, self.config.n_seq_max, 0),
        )
        tokens, self._logits = self.device.serve(batch, self._draws.sampler(drawers))
        self._drawn = {(s.request.id, s.sample): i for i, s in enumerate(drawers)}
        return tokens

    def _failed(self, state: State) -> Output:
        """Ends a sample that has no logits to sample from; nobody finds what it computed."""
        self._metrics.bad_logits()
        state.error = (
            f"{state.request.name}: the logits of its token at position {len(state.tokens) - 1} "
            "have NaN, +inf or no finite value, so there is no next token; the weights, or the "
            "cached keys and values before it, are damaged: check the model"
        )
        if isinstance(self.space, PagedSpace):
            self.space.disown(state)
        self._scheduler.finish(state, "error")
        return self._ended(state)

    def _ended(self, state: State, *tokens: int) -> Output:
        self.space.forget(state)
        self._draws.forget(state)
        self._metrics.ended(state)
        return Output(
            id=state.request.id,
            sample=state.sample,
            tokens=tokens,
            finish_reason=state.finish_reason,
            n_cached=state.n_cached or 0,
            error=state.error,
        )


def _check(config: CacheConfig, rules: Rules, mode: str, tiers: TierConfig | None) -> None:
    if mode not in ("cell", "paged"):
        raise BadConfig(f"mode {mode!r}; 'cell' or 'paged'")
    if config.self_extend is not None:
        raise BadConfig("an engine does not move positions; do without self_extend")
    if tiers is not None and mode == "cell":
        raise BadConfig("tiers keep blocks, and cell mode has none; use mode='paged'")
    if any_by_channel(config.type_k):
        raise BadConfig(
            f"keys of {config.type_k} are coded together with their neighbours, and an engine's "
            "blocks come and go; use int4, or a Runtime"
        )
    if config.n_rs_seq:
        raise BadConfig(f"n_rs_seq is {config.n_rs_seq}; an engine never cuts back, set it to 0")
    if rules.n_batch > config.n_ubatch:
        raise BadConfig(
            f"n_batch is {rules.n_batch}, above n_ubatch {config.n_ubatch}; raise n_ubatch"
        )

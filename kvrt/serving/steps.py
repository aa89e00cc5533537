"""The step of an engine: a plan, the arrays it needs, what was sampled, and what that means."""

import time
from collections.abc import Iterable, Sequence

import numpy as np

from kvrt.arrays import Array, Float
from kvrt.cells.slots import pad
from kvrt.errors import BadRequest
from kvrt.program.batch import Batch
from kvrt.program.device import Device
from kvrt.program.sample import NO_TOKEN
from kvrt.serving.beams.running import RunningBeams
from kvrt.serving.cache.base import Space
from kvrt.serving.config import EngineConfig
from kvrt.serving.metrics import EngineStats, Metrics, device_counts
from kvrt.serving.outputs import bad_logits, output_of
from kvrt.serving.request import Output, SeqState
from kvrt.serving.samplers import Samplers
from kvrt.serving.scheduling.agreement import Agreement
from kvrt.serving.scheduling.scheduler import Scheduler
from kvrt.serving.scheduling.step_plan import StepPlan
from kvrt.serving.step_batch import StepBatch, step_batch


class EngineSteps:
    """Runs steps of samples in a cache.

    Attributes:
      scheduler: who runs.
      samplers: how they are sampled.
      beams: searches among them.
      metrics: what was done.
    """

    def __init__(
        self,
        device: Device,
        space: Space,
        options: EngineConfig,
        agreement: Agreement | None = None,
    ) -> None:
        """Nobody is there.

        Args:
          device: runs programs.
          space: the cache on it.
          options: of the engine, its rules given.
          agreement: with other processes that plan the same; None is one process.
        """
        assert options.rules is not None, "fitted options have rules"
        self._device, self._space, self._n_batch = device, space, options.rules.n_batch
        self._n_seq_max, self._agreement = space.n_seq_max, agreement
        self.scheduler = Scheduler(space, options.rules)
        self.samplers = Samplers(self._n_seq_max, options.n_recent)
        self.beams = RunningBeams(self.scheduler, device)
        self.metrics = Metrics(space.residency)
        # What the newest tokens were sampled from, and the samples that they are of, in order.
        self._logits: Array | None = None
        self._sampled: Sequence[SeqState] = ()

    def add(self, states: Iterable[SeqState]) -> None:
        """Takes new samples in; raises BadRequest, see `Scheduler.add`."""
        for state in states:
            self.scheduler.add(state)
            self.beams.add(state)
            if self._agreement:
                self._agreement.add([state])

    def logits(self, request_id: str, sample: int) -> Float[Array, " V"]:
        """See `Engine.logits`; raises BadRequest."""
        wanted = (request_id, sample)
        for i, state in enumerate(self._sampled):
            if (state.request.id, state.sample) == wanted and state.request.num_beams == 1:
                assert self._logits is not None, "it was sampled from some"
                return self._logits[i]
        raise BadRequest(f"the last step sampled nothing for request {request_id!r}, {sample}")

    def report(self, ended: Sequence[SeqState]) -> list[Output]:
        """What there is to report of samples that ended before they could sample more."""
        return [self._output(state) for state in self.beams.ended(ended)]

    def step(self, *, waits: bool) -> list[Output]:
        """Plans and runs a step; what is new.

        Args:
          waits: for a tier, where nobody can do anything before it has loaded something.
        """
        self._space.begin_step()
        plan = self.scheduler.plan()
        outputs = self.report(plan.refused) if plan.refused else []
        self._sampled = ()
        if not plan.n_tokens:
            if self._agreement:
                self._agreement.check(None)
            if self._space.tiers and waits and not outputs:
                self._space.tiers.wait()
            return outputs
        self.metrics.planned(plan)
        start = time.perf_counter()
        step = step_batch(plan, self._n_seq_max, self._n_batch)
        states = [*plan.ending, *(dst for _, dst in plan.forks)]
        tokens, self._logits = self._run(step, plan, states)
        self._sampled = states
        self._space.commit(step)
        self.scheduler.ran(plan)
        self.metrics.ran(plan, len(states))
        if self._space.tiers and step.prompts:
            self._space.tiers.computed(step.tokens.size, time.perf_counter() - start)
        return outputs + self._take(zip(states, tokens.tolist(), strict=False), self._logits)

    def snapshot(self, *, n_pins: int) -> EngineStats:
        """Counters so far, and n_pins prefixes that are pinned."""
        space = self._space
        return self.metrics.snapshot(
            n_running=len(self.scheduler.running),
            n_waiting=self.scheduler.n_waiting,
            n_pins=n_pins,
            pools=tuple(space.pool_use()),
            checkpoints=space.checkpoint_use,
            tiers=space.tiers.report() if space.tiers else {},
            **device_counts(self._device),
        )

    def _run(
        self, step: StepBatch, plan: StepPlan, states: list[SeqState]
    ) -> tuple[np.ndarray, Array]:
        """Runs a step; the next token of each of some samples, and the logits of all."""
        places, recurrent = self._space.place(step)
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
            out_ids=pad(wanted, self._n_seq_max, 0),
        )
        sampler = self.samplers.sampler(states)
        if self._agreement:
            self._agreement.check(batch)
        return self._device.serve(batch, sampler)

    def _take(self, sampled: Iterable[tuple[SeqState, int]], logits: Array) -> list[Output]:
        """Appends what a step sampled, row by row of its logits; what there is to report."""
        outputs: list[Output] = []
        if self.beams:
            n_forks = self.beams.n_forks
            sampled, texts = self.beams.advance(sampled, logits)
            outputs += [self._output(text, *text.output) for text in texts]
            self.metrics.forked(self.beams.n_forks - n_forks)
        for state, token in sampled:
            if state.seq_id is None:
                continue  # a fork that found no room is computed by itself later on
            if token == NO_TOKEN:
                self.metrics.bad_logits()
                self.scheduler.finish(state, "error", bad_logits(state), damaged=True)
                outputs.append(self._output(state))
                continue
            reason = state.append(token)
            if reason is not None:
                self.scheduler.finish(state, reason)
                outputs.append(self._output(state, token))
            else:
                n_cached, n_dropped = state.n_cached or 0, state.n_dropped
                of = state.request.id, state.sample
                outputs.append(Output(*of, (token,), None, n_cached, None, n_dropped))
        return outputs

    def _output(self, state: SeqState, *tokens: int) -> Output:
        """What there is to report of a sample, ended or not."""
        if state.finish_reason is not None:
            self.metrics.finished(state)
        return output_of(state, tokens)

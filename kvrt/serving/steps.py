"""The step of an engine: a plan, the arrays it needs, what was sampled, and what that means.

What a step sampled has to be on the host before its samples can end, and until then the device
waits. So the next step can be planned and dispatched before the last one is read, as far as its
tokens are those that the last one sampled, which never leave the device. A sample that has ended by
then was computed once too often. That token is reported and counted nowhere, no prefix cache learns
it, and it goes with the room of its sample.

    launch A | launch B, read A | launch C, read B | ...

A step runs ahead if it decodes and nothing else, and if what it decides cannot depend on what was
sampled (`EngineSteps._may_run_ahead`). In any other case the last one is read first.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from kvrt.arrays import Array, Float
from kvrt.cache.runner import Runner
from kvrt.cells.slots import pad
from kvrt.errors import BadRequest
from kvrt.options.engine import EngineConfig
from kvrt.program.device import Device
from kvrt.program.sample import NO_TOKEN, Sampler
from kvrt.serving.beams.running import RunningBeams
from kvrt.serving.cache.space import Space
from kvrt.serving.drafting.engine_drafts import EngineDrafts
from kvrt.serving.metrics import EngineStats, Metrics, device_counts
from kvrt.serving.outputs import Output, bad_logits, output_of
from kvrt.serving.reading.shared_reads import SharedReads
from kvrt.serving.request import SeqState
from kvrt.serving.samplers import Samplers
from kvrt.serving.scheduling.agreement import Agreement
from kvrt.serving.scheduling.scheduler import Scheduler
from kvrt.serving.scheduling.step_plan import StepPlan
from kvrt.serving.step_batch import Launched, StepBatch, step_batch

# In place of a token that is being sampled, while the step after it is planned.
_AWAITED = -1


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
        wanted = not device.is_host if options.run_ahead is None else options.run_ahead
        self._ahead = wanted and space.keeps_others and not device.is_divided
        self._drafts: EngineDrafts | None = None
        if options.speculation is not None:
            self._drafts = EngineDrafts(options.speculation, device, space, self._n_batch)
            self._ahead = False
        # Not read yet, the older one first; two of them only while a step runs.
        self._launched: deque[Launched] = deque()
        self._reads = reads = SharedReads(device) if options.shared_reads else None
        self._n_seq_max, self._agreement = space.n_seq_max, agreement
        check = agreement.check if agreement else None
        self._runner = Runner(device, space, reads and reads.share, check)
        self.scheduler = Scheduler(space, options.rules)
        self.samplers = Samplers(self._n_seq_max, options.n_recent)
        self.beams = RunningBeams(self.scheduler, device)
        self.metrics = Metrics(space.residency)
        # What the newest tokens were sampled from, and the samples that they are of, in order.
        self._logits: Array | None = None
        self._sampled: Sequence[SeqState] = ()
        # Of samples with several tokens the rows of the logits.
        self._rows: Mapping[SeqState, Sequence[int]] = {}

    def add(self, states: Iterable[SeqState]) -> None:
        """Takes new samples in; raises BadRequest, see `Scheduler.add`."""
        for state in states:
            self.scheduler.add(state)
            self.beams.add(state)
            if self._agreement:
                self._agreement.add([state])

    def logits(self, request_id: str, sample: int, index: int = -1) -> Float[Array, " V"]:
        """See `Engine.logits`; raises BadRequest."""
        wanted = (request_id, sample)
        for i, state in enumerate(self._sampled):
            if (state.request.id, state.sample) == wanted and state.request.num_beams == 1:
                assert self._logits is not None, "it was sampled from some"
                rows = self._rows.get(state, (i,))
                if -len(rows) <= index < len(rows):
                    return self._logits[rows[index]]
        raise BadRequest(f"the last step sampled nothing for request {request_id!r}, {sample}")

    def report(self, ended: Sequence[SeqState]) -> list[Output]:
        """What there is to report of samples that ended before they could sample more."""
        return [self._output(state) for state in self.beams.ended(ended)]

    def step(self, *, waits: bool) -> list[Output]:
        """Runs a step, or reads one that has run ahead; what is new.

        Args:
          waits: for a tier, where nobody can do anything before it has loaded something.
        """
        self._sampled, self._rows, outputs = (), {}, []
        if self._launched and all(s.status == "finished" for s in self._launched[0].states):
            self._launched.popleft()
        if not self._launched:
            plan = self._plan()
            outputs = self.report(plan.refused) if plan.refused else []
            if not (plan.decode or plan.prompts):
                if self._agreement:
                    self._agreement.check(None)
                if self._space.tiers and waits and not outputs:
                    self._space.tiers.wait()
                return outputs
            if self._drafts:
                self._drafts.plan(plan, len(self.scheduler.running))
            self._launch(plan, None)
        last = self._launched[0]
        if self._ahead and len(self._launched) == 1 and self._may_run_ahead(last):
            self._launch_ahead(last)
        # Whatever fails or interrupts before it was read, it can still be.
        return outputs + self._finish(last)

    def snapshot(self, *, n_pins: int) -> EngineStats:
        """Counters so far, and n_pins prefixes that are pinned."""
        space = self._space
        return self.metrics.snapshot(
            n_running=len(self.scheduler.running),
            n_waiting=self.scheduler.n_waiting,
            n_pins=n_pins,
            pools=tuple(space.pool_use()),
            checkpoints=space.checkpoint_use,
            reads=dict(self._reads.counts) if self._reads else {},
            tiers=space.tiers.report() if space.tiers else {},
            **device_counts(self._device),
        )

    # --- dispatch ------------------------------------------------------------------------------

    def _plan(self) -> StepPlan:
        self._space.begin_step()
        return self.scheduler.plan()

    def _may_run_ahead(self, last: Launched) -> bool:
        """Whether the step after one that is not read needs nothing that it sampled.

        Every sample that runs goes on to decode, or is known to end, and none is of a beam search,
        which chooses on the host; nobody can be admitted; no policy nor SelfExtend is about to move
        something; no penalty looks at sampled tokens; and there is room for all, so that nobody is
        preempted.
        """
        running = self.scheduler.running
        if len(last.states) != len(running) or last.plan.forks or self.samplers.looks_back:
            return False  # some compute a prompt, or were forked
        if any(s.status == "finished" for s in last.states):
            return False  # they were cancelled
        if (
            self.beams.searches
            or self.scheduler.may_admit
            or not self._space.has_room(len(running))
        ):
            return False
        if any(s.n_until == s.n_computed for s in running):
            return False
        return any(len(s.tokens) + 1 < s.n_most for s in running)

    def _launch_ahead(self, last: Launched) -> None:
        """Dispatches the step after one that is not read."""
        for state in last.states:
            state.tokens.append(_AWAITED)
        try:
            plan = self._plan()
            assert plan.decode and not plan.prompts, "who runs has a token to decode"
            self._launch(plan, last)
        finally:
            for state in last.states:
                state.tokens.pop()
        for state in plan.decode:
            state.n_past_read += 1

    def _launch(self, plan: StepPlan, last: Launched | None) -> None:
        """Dispatches a step, ahead of the last one if that was not read."""
        self.metrics.planned(plan)
        start, drafts = time.perf_counter(), self._drafts if plan.drafts else None
        n_rounds, early = (drafts.n_tokens(plan), drafts.on_device) if drafts else (None, False)
        step = step_batch(plan, self._n_seq_max, self._n_batch, n_rounds, cached_early=early)
        verified = None
        if drafts:
            states = [*step.decode, *plan.drafts]
            verified = drafts.run(self._runner, step, plan, self.samplers.sampler(states))
            logits, tokens = verified.logits, verified.first
        else:
            states, wanted = _outputs(step, plan)
            logits, tokens = self._run(step, wanted, self.samplers.sampler(states), last)
            if last is None:
                self._space.learn(step)
            self.scheduler.ran(plan)
        launched = Launched(
            plan=plan,
            step=step,
            states=states,
            tokens=tokens,
            verified=verified,
            logits=logits,
            start=start,
            ahead=last is not None,
        )
        self._launched.append(launched)

    def _run(
        self, step: StepBatch, wanted: Sequence[int], sampler: Sampler, last: Launched | None
    ) -> tuple[Array, Array]:
        """Dispatches a step; the logits of some of its tokens, and what was sampled from each."""
        out_ids, device = pad(wanted, self._n_seq_max, 0), self._device
        fed = None if last is None else self._awaited(step, last)
        logits, tokens = self._runner.run(
            step, out_ids, lambda batch: device.forward(batch, sampler), fed
        )
        assert tokens is not None, "there is a sampler"
        if self._ahead:
            tokens.copy_to_host_async()  # not behind the next step
        return logits, tokens

    def _awaited(self, step: StepBatch, last: Launched) -> Array:
        """The tokens of a step as the last one has sampled them, which nobody has read."""
        if step.decode == tuple(last.states):
            return last.tokens  # where none could be sampled any one will do
        column = dict(zip(last.states, range(len(last.states)), strict=True))
        source = pad([column[s] for s in step.decode], step.size, 0)
        return self._device.sampled(last.tokens, source)

    # --- what was sampled ----------------------------------------------------------------------

    def _finish(self, last: Launched) -> list[Output]:
        """Waits for what a step sampled, and takes it in; what there is to report."""
        before = None
        if self._drafts and last.plan.drafts:
            tokens, before = self._read_rounds(self._drafts, last)
        else:
            tokens = self._read(last)
        self._sampled, self._logits = last.states, last.logits
        return self._take(zip(last.states, tokens, strict=False), last.logits, before)

    def _read(self, last: Launched) -> list[int]:
        """The token of each sample of a step, when it is there."""
        tokens = self._device.read(last.tokens).tolist()
        self._launched.popleft()
        if last.ahead:
            # By now the tokens that it computed are known, and who has ended is gone.
            for state in last.step.decode:
                state.n_past_read -= 1
            self._space.learn(last.step)
        n_lacking = sum(dst.seq_id is None for _, dst in last.plan.forks)
        # Tokens past the end of their sample are not counted.
        n_past = sum(s.status == "finished" for s in last.step.decode) if last.ahead else 0
        n_sampled = len(last.states) - n_lacking - n_past
        self.metrics.ran(last.plan, n_sampled, n_past, ahead=last.ahead)
        if self._space.tiers and last.step.prompts:
            self._space.tiers.computed(last.step.tokens.size, time.perf_counter() - last.start)
        return tokens

    def _read_rounds(
        self, drafts: EngineDrafts, last: Launched
    ) -> tuple[list[int], dict[SeqState, tuple[int, ...]]]:
        """The newest token of each sample of a step with drafts, and those that it took in before.

        They are in the cache from here on, but for the newest ones.
        """
        found, plan = drafts.read(last), last.plan
        self._launched.popleft()
        # Who was cancelled before it was read keeps nothing.
        kept = {s: 0 if s.status == "finished" else len(found[s]) for s in last.states}
        before = {s: tuple(found[s][:n][:-1]) for s, n in kept.items()}
        drafts.ran(plan, kept)
        step, stays = last.step.kept(kept)
        for state, tokens in before.items():
            state.tokens += tokens
        self._space.append(step, stays)
        self.scheduler.ran(plan)
        for state, tokens in before.items():
            state.n_computed += len(tokens)
        self._space.learn(step)
        self.metrics.ran(plan, sum(kept.values()))
        self.metrics.drafted(plan, sum(map(len, before.values())))
        self._rows = drafts.rows(last, found)
        return [found[s][-1] for s in last.states], before

    def _take(
        self,
        sampled: Iterable[tuple[SeqState, int]],
        logits: Array,
        before: Mapping[SeqState, tuple[int, ...]] | None = None,
    ) -> list[Output]:
        """Appends what a step sampled, row by row of its logits; what there is to report.

        Of some samples tokens `before` that are there already.
        """
        outputs: list[Output] = []
        earlier = before or {}
        if self.beams.searches:
            n_forks = self.beams.n_forks
            sampled, texts = self.beams.advance(sampled, logits)
            outputs += [self._output(text, *text.output) for text in texts]
            self.metrics.forked(self.beams.n_forks - n_forks)
        for state, token in sampled:
            if state.seq_id is None:
                continue  # a fork that found no room, computed later on; or one token past its end
            if token == NO_TOKEN:
                self.metrics.bad_logits()
                self.scheduler.finish(state, "error", bad_logits(state), damaged=True)
                outputs.append(self._output(state, *earlier.get(state, ())))
                continue
            reason = state.append(token)
            if reason is not None:
                self.scheduler.finish(state, reason)
                outputs.append(self._output(state, *earlier.get(state, ()), token))
            else:
                outputs.append(output_of(state, (*earlier.get(state, ()), token)))
        return outputs

    def _output(self, state: SeqState, *tokens: int) -> Output:
        """What there is to report of a sample, ended or not."""
        if state.finish_reason is not None:
            self.metrics.finished(state)
        return output_of(state, tokens)


def _outputs(step: StepBatch, plan: StepPlan) -> tuple[list[SeqState], Sequence[int]]:
    """Samples that get a token each, forks last, and which token of the step each is behind."""
    if not (step.prompts or plan.forks):
        return plan.decode, range(len(plan.decode))
    ends, parents = step.last(), {dst: src for src, dst in plan.forks}
    states = [*plan.ending, *parents]
    return states, [ends[parents.get(s, s)] for s in states]

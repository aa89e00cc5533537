"""Drafts of samples that decode: which a step verifies, and what became of them.

A step that computes no prompt takes the newest token of a sample and its drafts, as far as they fit
the step and the cache. What is sampled is known on the device before anything is written, so that a
refused draft leaves no trace there; and only once it was read does the host take tokens in, so that
no prefix cache learns of it either.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kvrt.cache import checks
from kvrt.cache.runner import Runner
from kvrt.drafts.back_off import BackOff, after_round
from kvrt.drafts.drafter import DraftContext, Speculation
from kvrt.drafts.layer_skip import LayerSkip
from kvrt.program.device import Device
from kvrt.program.rounds.round import Drafted, RoundSpec, Verified
from kvrt.program.sample import Sampler
from kvrt.serving.cache.space import Space
from kvrt.serving.request import SeqState
from kvrt.serving.samplers import last_n_of
from kvrt.serving.scheduling.step_plan import StepPlan
from kvrt.serving.step_batch import Launched, StepBatch

# In place of a draft that the device makes.
_TO_BE_MADE = 0


class EngineDrafts:
    """Asks for drafts, and has a step verify them."""

    def __init__(self, spec: Speculation, device: Device, space: Space, n_batch: int) -> None:
        """Nobody has drafts; of n_batch tokens a step."""
        self._spec, self._device, self._space = spec, device, space
        # Rounds come in powers of two, so that few programs do, and a step is no longer than one of
        # prompts.
        self._n_most = 1
        while 2 * self._n_most * (spec.n_draft + 1) <= n_batch:
            self._n_most *= 2
        self._n_most = min(self._n_most, 1 << (space.n_seq_max - 1).bit_length())

    def plan(self, plan: StepPlan, n_running: int) -> None:
        """Adds drafts to a plan that computes no prompt; room for them is taken.

        Raises:
          BadToken: the drafter gave what is no token of the model.
        """
        if plan.prompts or plan.forks:
            return
        for state in plan.decode:
            if len(plan.drafts) == self._n_most or not plan.n_left:
                return
            drafts = self._drafts(state, min(self._spec.n_draft, plan.n_left))
            drafts = drafts[: self._n_room(state, len(drafts), n_running)]
            if drafts:
                plan.drafts[state] = tuple(drafts)
                plan.n_left -= len(drafts)

    def n_tokens(self, plan: StepPlan) -> int:
        """Tokens that a step has for rounds, padding included."""
        return self._n_rounds(plan) * (self._spec.n_draft + 1)

    @property
    def on_device(self) -> bool:
        """Whether the device drafts in the step that verifies."""
        return self._spec.exit_layer is not None

    def run(self, runner: Runner, step: StepBatch, plan: StepPlan, sampler: Sampler) -> Verified:
        """Dispatches a step with drafts; nothing of it is there before it was read."""
        last = step.last()
        drafted = [
            Drafted(
                number=number,
                first=last[state] - len(mine),
                last_n=last_n_of(state),
                drafts=mine,
                # Of drafts that are given those behind a stop token are left out.
                stop_ids=state.request.stop_ids if self.on_device else (),
            )
            for number, (state, mine) in enumerate(plan.drafts.items(), step.n_single)
        ]
        size, how = (self._n_rounds(plan), self._spec.n_draft), self._spec.exit_layer
        return runner.round(step, drafted, size, RoundSpec(exit_layer=how), sampler)

    def read(self, launched: Launched) -> dict[SeqState, list[int]]:
        """The tokens that a step sampled, by sample, when they are there."""
        assert launched.verified is not None, "it has drafts"
        first, more, n_drafted = launched.verified.read()
        found = {s: [t] for s, t in zip(launched.states, first, strict=False)}
        drafts = launched.plan.drafts
        # Those that the device was to make behind the end of a text were not made.
        made = zip(drafts.items(), n_drafted, strict=False)
        drafts.update([(s, x[:n]) for (s, x), n in made])
        for state, tokens in zip(drafts, more, strict=False):
            found[state] += tokens
        return found

    def rows(
        self, launched: Launched, tokens: Mapping[SeqState, Sequence[int]]
    ) -> dict[SeqState, list[int]]:
        """By sample, where the logits of each of its tokens stand."""
        found = {s: [i] for i, s in enumerate(launched.states)}
        for i, state in enumerate(launched.plan.drafts):
            start = self._space.n_seq_max + i * self._spec.n_draft
            found[state] += range(start, start + len(tokens[state]) - 1)
        return found

    def ran(self, plan: StepPlan, n_sampled: Mapping[SeqState, int]) -> None:
        """Notes how drafts fared, before the tokens that were sampled are those of the samples."""
        for state, drafts in plan.drafts.items():
            n = n_sampled[state]
            before = state.back_off or BackOff()
            state.back_off = after_round(before, len(state.tokens) + n, len(drafts), n - 1)

    def _drafts(self, state: SeqState, n: int) -> list[int]:
        """At most n tokens that may follow those of a sample."""
        request, n_next = state.request, state.n_computed + 1
        if request.num_beams > 1 or not request.drafts:
            return []
        if state.back_off is not None and len(state.tokens) < state.back_off.n_resume:
            return []
        # The last token that is sampled needs no draft, nor is one verified beyond a move.
        ends = [state.n_most - 1, *([] if state.n_until is None else [state.n_until])]
        if (size := self._space.state_size) is not None:
            # A block has one state, and the one that a step begins with may be others' to find.
            ends.append(-(-n_next // size) * size)
        n = min([n, *(end - n_next for end in ends)])
        if n < 1:
            return []
        drafter = self._spec.drafter
        if isinstance(drafter, LayerSkip):
            return [_TO_BE_MADE] * n
        assert state.seq_id is not None, "a sample that decodes has a sequence number"
        context = DraftContext(
            tokens=np.array(state.tokens, np.int32),
            seq_id=state.seq_id,
            n_sampled=state.n_sampled,
            sampling=state.sampling,
        )
        drafts = list(drafter.draft(context, n))[:n]
        ids = checks.token_ids(drafts, self._device.n_vocab).tolist() if drafts else []
        # Where a sample ends nothing is computed any more.
        stop = next((i for i, t in enumerate(ids) if t in request.stop_ids), len(ids))
        return ids[:stop]

    def _n_room(self, state: SeqState, n: int, n_running: int) -> int:
        """Of n drafts, those for which there is room that nobody's next token may need."""
        n_next = state.n_computed + 1
        while n and state.capacity < n_next + n:
            if self._space.has_room(n_running + n) and self._space.grow(state, n_next + n):
                break
            n = max(min(n // 2, n - 1), min(state.capacity - n_next, n - 1), 0)
        return n

    def _n_rounds(self, plan: StepPlan) -> int:
        return 1 << (len(plan.drafts) - 1).bit_length()

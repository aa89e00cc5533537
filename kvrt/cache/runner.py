"""Steps of one sequence or many: place, run, commit.

    place    slots for the tokens of a step, after copies and K-shifts that are pending
    run      a program: a step, a loop of them on the device, a step with drafts
    commit   the tokens that stay are in the host's cells or blocks, states and history

A step that raises before it is committed leaves no token, and Ctrl-C waits until it is. Which
tokens stay of a run that samples is known once it has been read; its caller appends them then.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from kvrt.arrays import AnyArray, Bool, Int32
from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache.host_cells import SlotPlan, Where
from kvrt.cells.slots import Places, StepTokens
from kvrt.exclusive import HeldInterrupts
from kvrt.program.batch import Batch, to_batch
from kvrt.program.device import Device
from kvrt.program.rounds.round import Drafted, RoundSpec, Verified, round_step
from kvrt.program.sample import Sampler

Result = TypeVar("Result")
StepT = TypeVar("StepT", bound=StepTokens)
StepOf = TypeVar("StepOf", bound=StepTokens, contravariant=True)
# A step and its places by group of layers, to places in which sequences may share what they read.
Share = Callable[[StepTokens, tuple[Places, ...]], tuple[Places, ...]]


@runtime_checkable
class StepSpace(Protocol[StepOf]):
    """A cache that steps write to: in cells, or in blocks."""

    def place(self, step: StepOf) -> Where:
        """Slots and blocks of a step's tokens by group of the layout, and state indices.

        Raises:
          CacheFull: there is no room for them.
        """
        ...

    def append(self, step: StepOf, stays: Bool[np.ndarray, " n"] | None = None) -> None:
        """Adds tokens of the step that was placed last, which was dispatched.

        Args:
          step: that step, without tokens that do not stay.
          stays: which tokens of the placed one these are; None is all.
        """
        ...


class CellSteps:
    """Cells for steps of a Runtime."""

    _plan: SlotPlan  # of the step that was placed last

    def __init__(self, cache: CellCache):
        """Takes a cache, which others may edit between steps."""
        self._cache, self._host = cache, cache.host

    def place(self, step: StepTokens) -> Where:
        """See `StepSpace`; copies of shared blocks, packing and K-shifts come first."""
        if self._host.blocks is not None:
            self._cache.copy_on_write(step.seq_ids, step.first)
        if any([x.stale or x.pending for x in self._host.groups]):
            self._cache.flush()
        self._plan = plan = self._host.find(step.seq_ids, step.first)
        self._cache.logits.forget(step.first)
        return self._host.places(step, [x.slots for x in plan.found], plan.states)

    def append(self, step: StepTokens, stays: Bool[np.ndarray, " n"] | None = None) -> None:
        """See `StepSpace`."""
        plan = self._plan if stays is None else self._host.kept(self._plan, stays)
        self._host.append(plan, step.pos, step.tokens)


class Runner(Generic[StepT]):
    """Runs steps on a device, whose tokens a space has places for; CacheFull is the space's."""

    def __init__(
        self,
        device: Device,
        space: StepSpace[StepT],
        share: Share | None = None,
        check: Callable[[Any], None] | None = None,
    ):
        """Takes a device and the cache on it, which others may edit between steps.

        Args:
          device: runs programs.
          space: the cache.
          share: of a step's places those that it runs with.
          check: called with the arrays of each step before it runs.
        """
        self._device, self._space, self._share, self._check = device, space, share, check

    def run(
        self,
        step: StepT,
        out_ids: Int32[np.ndarray, " R"],
        program: Callable[[Batch], Result],
        tokens: AnyArray | None = None,
    ) -> Result:
        """What a program gives for a step whose tokens all stay; the device may have `tokens`."""
        batch = to_batch(step, self._place(step), out_ids, tokens)
        if self._check:
            self._check(batch)
        with HeldInterrupts():
            result = program(batch)
            self._space.append(step)
        return result

    def round(
        self,
        step: StepT,
        drafted: Sequence[Drafted],
        size: tuple[int, int],
        how: RoundSpec,
        sampler: Sampler,
    ) -> Verified:
        """What a step with drafts gives, see `round_step`; nothing is read nor appended yet."""
        arrays = round_step(step, self._place(step), drafted, size, sampler)
        if self._check:
            self._check(arrays)
        return self._device.verify(arrays, how)

    def _place(self, step: StepT) -> Where:
        places, states = self._space.place(step)
        return (self._share(step, places) if self._share else places), states

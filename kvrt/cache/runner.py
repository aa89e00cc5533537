"""Steps of one sequence or many: place, run, commit.

    place    slots for the tokens of a step, after copies and K-shifts that are pending
    run      a program: a step, a loop of them on the device, a step with drafts
    commit   the tokens that stay are in the host's cells or blocks, states and history

A step that raises before it is committed leaves no token. Which tokens stay of a run that samples
is known once it has been read; its caller appends them then.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from kvrt.arrays import AnyArray, Bool, Int32
from kvrt.cellcache.host_cells import Where
from kvrt.cells.slots import Places, StepTokens, pad
from kvrt.program.batch import Batch, to_batch
from kvrt.program.device import Device
from kvrt.program.rounds.layer_skip import round_program
from kvrt.program.rounds.round import Drafted, RoundSpec, RoundStep, Verified, plan_rounds
from kvrt.program.sample import Sampler

Found = TypeVar("Found")
# Gets a step and its places before it runs, and returns those that it runs with.
OnPlaced = Callable[[StepTokens, tuple[Places, ...]], tuple[Places, ...]]


@runtime_checkable
class StepSpace(Protocol):
    """A cache that steps write to: in cells, or in blocks."""

    def place(self, step: StepTokens) -> Where:
        """Slots and blocks of a step's tokens by group of the layout, and state indices."""
        ...

    def append(self, step: StepTokens, stays: Bool[np.ndarray, " n"] | None = None) -> None:
        """Adds tokens of the step that was placed last, which was dispatched.

        Args:
          step: that step, without tokens that do not stay.
          stays: which tokens of the placed one these are; None is all.
        """
        ...


class Runner:
    """Runs steps on a device, whose tokens a space has places for."""

    def __init__(
        self,
        device: Device,
        space: StepSpace,
        on_placed: OnPlaced | None = None,
        check: Callable[[Any], None] | None = None,
    ):
        """Takes a device and the cache on it, which others may edit between steps.

        Args:
          device: runs programs.
          space: the cache.
          on_placed: called with each step's places, before it runs; None leaves them.
          check: called with the arrays of each step, before it runs.
        """
        self._device, self._space = device, space
        self._on_placed, self._check = on_placed, check

    def place(self, step: StepTokens, out_ids: np.ndarray, tokens: AnyArray | None = None) -> Batch:
        """Places a step; its arrays, see `to_batch`; raises CacheFull."""
        places, states = self._space.place(step)
        if self._on_placed:
            places = self._on_placed(step, places)
        return to_batch(step, (places, states), out_ids, tokens)

    def run(
        self,
        step: StepTokens,
        out_ids: Int32[np.ndarray, " R"],
        program: Callable[[Batch], Found],
        tokens: AnyArray | None = None,
    ) -> Found:
        """Runs a program on a step, all tokens of which stay; what it gives, not waited for.

        Args:
          step: new tokens.
          out_ids: outputs.
          program: takes a batch.
          tokens: the step's, where the device has them and the host does not know them yet.

        Raises:
          CacheFull: there is no room for the tokens.
        """
        batch = self.place(step, out_ids, tokens)
        if self._check:
            self._check(batch)
        found = program(batch)
        self._space.append(step)
        return found

    def round(
        self,
        step: StepTokens,
        drafted: Sequence[Drafted],
        size: tuple[int, int],
        how: RoundSpec,
        sampler: Sampler,
    ) -> Verified:
        """Runs a step some of whose sequences have drafts; not read, and nothing is appended.

        Args:
          step: tokens with a list of their own, then those of the rounds.
          drafted: of each round.
          size: rounds and drafts that the program is compiled for.
          how: what it is compiled for besides.
          sampler: of every sequence, those without drafts first.

        Raises:
          CacheFull: there is no room for the tokens.
        """
        n_seqs = len(sampler.seed)
        rounds, outputs = plan_rounds(drafted, size, n_seqs, step.size)
        firsts = [*range(step.n_single), *(x.first for x in drafted)]
        batch = self.place(step, np.concatenate([pad(firsts, n_seqs, 0), outputs]))
        arrays = RoundStep(batch=batch, rounds=rounds, sampler=sampler)
        if self._check:
            self._check(arrays)
        program = round_program(self._device.programs, self._device.cache, arrays, how)
        return self._device.verify(program)

"""The host side of a cell cache: its contents, and the slots of a step's tokens."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from kvrt.arrays import Bool
from kvrt.cellcache import contents, history, recurrent, window
from kvrt.cellcache.blocks import Blocks
from kvrt.cellcache.checkpoint import resume
from kvrt.cellcache.checkpoint.checkpoints import Checkpoints
from kvrt.cellcache.checkpoint.resume import ResumePositions
from kvrt.cellcache.contents import CacheContents, Changed
from kvrt.cellcache.group import FoundSlots
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.indexed_group import IndexedGroup
from kvrt.cellcache.recurrent import RecurrentStates, StatePlan
from kvrt.cellcache.window import Intervals
from kvrt.cells import Cells
from kvrt.cells.slots import Places, StepTokens
from kvrt.config import MAX_POS, GroupSpec, RecurrentSpec
from kvrt.options.cache import CacheConfig
from kvrt.options.select import Select
from kvrt.store.recurrent import StateIndex, n_states

# Places by group, and state indices where layers are recurrent.
Where = tuple[tuple[Places, ...], StateIndex | None]


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """Slots of new tokens by group, and state indices.

    Attributes:
      seq_ids: sequence of each token.
      first: by sequence, the position of its first token.
      found: slots by group.
      states: state indices where layers are recurrent.
    """

    seq_ids: np.ndarray
    first: Mapping[int, int]
    found: tuple[FoundSlots, ...]
    states: StatePlan | None


class HostCells:
    """An indexed group of cells for each group of attention layers, states and token history.

    Attributes:
      groups: in the order of the model's groups.
      complete: those that keep every position.
      main: the first of them, else the first group; None without attention layers.
      rolls: whether a group uses cells again that no later token sees.
      n_pinned: first positions of each sequence that no group uses again, for a policy that drops
        what follows them; None is no policy.
      states: None without recurrent layers.
      history: the tokens of each sequence.
      checkpoints: where sequences can be cut back to beside their newest tokens.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        recurrent_spec: RecurrentSpec | None,
        config: CacheConfig,
        n_pinned: int | None = None,
    ):
        """Empty cells.

        Args:
          groups: of attention layers.
          recurrent_spec: of recurrent layers.
          config: sizes; n_seq_max sequences may have new tokens.
          n_pinned: see the class.
        """
        self.n_pinned = n_pinned
        self._n_seq_max = config.n_seq_max
        self.groups = tuple(IndexedGroup(g, config, n_pinned) for g in groups)
        self.complete = [x for x in self.groups if not x.group.rolls]
        self.main: IndexedGroup | None = next(iter([*self.complete, *self.groups]), None)
        self.rolls = len(self.complete) < len(self.groups)
        self.history, self.checkpoints = TokenHistory(), Checkpoints()
        self.states: RecurrentStates | None = None
        if recurrent_spec:
            depth = 1 + config.n_rs_seq
            self.states = RecurrentStates(n_states=n_states(config), depth=depth)

    @property
    def contents(self) -> CacheContents:
        """Groups, states, token history and checkpoints as they are."""
        return CacheContents(
            groups=tuple(x.group for x in self.groups),
            states=self.states,
            history=self.history,
            checkpoints=self.checkpoints,
        )

    @property
    def cells(self) -> Cells:
        """Positions and owners of the main group; without attention layers those of the states."""
        if self.main is not None:
            return self.main.cells
        assert self.states is not None, "a model without layers"
        return recurrent.as_cells(self.states, self._n_seq_max)

    @property
    def in_blocks(self) -> frozenset[int]:
        """Sequences that lie in blocks, in all groups that keep every position."""
        return self.blocks.seqs if self.blocks is not None else frozenset()

    def commit(self, new: CacheContents) -> None:
        """Replaces the contents by edited ones."""
        for indexed, group in zip(self.groups, new.groups, strict=True):
            indexed.replace(group)
        self.states, self.checkpoints = new.states, new.checkpoints
        self.history = new.history

    @property
    def n_free(self) -> int:
        """Tokens that there are cells for; without a limit where no group keeps them all.

        Empty cells that are reserved for sequences in blocks are not counted.
        """
        return min((x.n_free for x in self.complete), default=MAX_POS)

    @property
    def blocks(self) -> Blocks | None:
        """Which sequences lie in blocks; None is none."""
        return self.complete[0].group.blocks if self.complete else None

    def n_fit(self, seq_id: int) -> int:
        """Tokens that there is room for at the end of a sequence."""
        return min((x.n_fit(seq_id) for x in self.complete), default=MAX_POS)

    def plan_copy_on_write(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> Changed | None:
        """Copies of shared blocks that tokens are about to write to; None if there are none.

        Raises:
          CacheFull: sequences lie in blocks, and the tokens do not fit.
        """
        new, copies = contents.copy_on_write(self.contents, seq_ids, first)
        return (new, copies) if any(len(src) for src, _ in copies) else None

    def pos_max(self, seq_id: int) -> int:
        """The position before the next token of a sequence, -1 if it is empty."""
        if self.main is not None:
            return self.main.pos_max(seq_id)
        return recurrent.n_past(self.states, seq_id) - 1 if self.states else -1

    def resumes_at(self, seq_id: int, pos: int) -> bool:
        """Whether a token at `pos`, at most the end of a sequence, finds all that it sees of it."""
        return not any(a <= pos < b for a, b in self._resume_gaps(seq_id))

    def resume_positions(self, seq_id: int) -> ResumePositions:
        """The positions that a sequence can be cut back to."""
        return resume.of_layers(self._resume_gaps(seq_id), self.checkpoints.positions(seq_id))

    def _resume_gaps(self, seq_id: int) -> Intervals:
        """Positions [a, b) where some layer lacks what the next token sees; they may overlap."""
        groups = self.contents.groups
        windows = (window.resume_gaps(g.mask, g.lost.get(seq_id, ())) for g in groups)
        states = recurrent.resume_gaps(self.states, seq_id) if self.states else ()
        return (*itertools.chain(*windows), *states)

    def first_sparse(self, select: Select, seq_id: int, first: int) -> int | None:
        """The position from which on single tokens of a sequence have read some of its cells.

        A token reads all where the units with a cell before it are no more than it may choose.

        Args:
          select: how cells are chosen.
          seq_id: the sequence.
          first: position of the first of its newest tokens, which were computed one by one.

        Returns:
          The position of one of these tokens; None where all of them have read everything.
        """
        full = [x for x in self.groups if x.group.mask.kind == "full"]
        found = [x.first_beyond(seq_id, select.n_units, select.unit) for x in full]
        begins = max(first, min(found, default=MAX_POS) + 1)
        return begins if begins <= self.pos_max(seq_id) else None

    def find(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> SlotPlan:
        """Plans slots and state indices for new tokens; raises CacheFull."""
        return SlotPlan(
            seq_ids=seq_ids,
            first=first,
            found=tuple(x.find(seq_ids, first) for x in self.groups),
            states=recurrent.plan_states(self.states, seq_ids, first) if self.states else None,
        )

    def probe(self, step: StepTokens) -> Where:
        """Places of tokens that are not stored; their state is to be put back after them."""
        seq_id, n, none = int(step.seq_ids[0]), len(step.seq_ids), np.zeros(0, np.int32)
        states = recurrent.plan_probe(self.states, seq_id, n) if self.states else None
        return self.places(step, [none] * len(self.groups), states)

    def places(
        self, step: StepTokens, slots: Sequence[np.ndarray], states: StatePlan | None = None
    ) -> Where:
        """Slots of a step's tokens by group with the blocks that they read, and state indices."""
        both = zip(self.groups, slots, strict=True)
        places = tuple([group.places(of, step) for group, of in both])
        return places, None if states is None else _state_index(step, states)

    def released_states(self) -> Bool[np.ndarray, " R"]:
        """Which state indices no sequence uses."""
        return recurrent.released(self.states) if self.states else np.zeros(0, bool)

    def kept(self, plan: SlotPlan, stays: Bool[np.ndarray, " n"]) -> SlotPlan:
        """The plan of tokens that stay, of each sequence the first ones.

        Each sequence writes to one index of a state, whether one of its tokens stays or more.
        """
        seq_ids = plan.seq_ids[stays]
        return SlotPlan(
            seq_ids=seq_ids,
            first=plan.first,
            found=tuple(dataclasses.replace(f, slots=f.slots[stays]) for f in plan.found),
            states=recurrent.plan_states(self.states, seq_ids, plan.first) if self.states else None,
        )

    def append(self, plan: SlotPlan, pos: np.ndarray, ids: np.ndarray) -> None:
        """Adds all tokens of a plan, which a step has written in every layer."""
        self.history = history.append(self.history, plan.seq_ids, pos, ids)
        for indexed, found in zip(self.groups, plan.found, strict=True):
            indexed.append(found, pos, plan.seq_ids)
        if plan.states is not None:
            self.states = plan.states.after


def _state_index(step: StepTokens, states: StatePlan) -> StateIndex:
    """State indices of a step; padding starts from no state and is stored nowhere."""
    src, dst = (step.spread(x, states.after.n_states) for x in (states.src, states.dst))
    return StateIndex(src=src, dst=dst)

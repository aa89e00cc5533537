"""The cell cache: positions and owners on the host, keys and values on the device, kept in step."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from kvrt.attention.choice.cases import query_heads
from kvrt.attention.contract import Decoder
from kvrt.attention.scored.layers import LayerKinds, by_kind
from kvrt.cache import checks
from kvrt.cache.checkpoint import open_checkpoints
from kvrt.cache.last_logits import LastLogits
from kvrt.cache.stats import Counts, LostCheckpoint
from kvrt.cellcache import contents, history
from kvrt.cellcache.blocks import CellCopies
from kvrt.cellcache.checkpoint import checkpoints
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.host_cells import HostCells
from kvrt.cellcache.insert import plan_rewind
from kvrt.cells import check_seq_id, n_used
from kvrt.cells.edits import Copy, Keep, Remove, SeqEdit
from kvrt.config import GroupSpec, layer_traits
from kvrt.errors import CannotRewind, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.options.compose import Traits, check_together
from kvrt.policies import AnyPolicy, Policy, ScoredPolicy, by_position, policy_traits
from kvrt.policies.self_extend import extend_schedule
from kvrt.program.device import Device
from kvrt.program.layout import cell_layout
from kvrt.program.mesh import Placement
from kvrt.upkeep.defrag import plan_defrag, should_defrag


class CellCache:
    """A cell cache, in which each change is planned on the host before anything moves.

    Attributes:
      host: positions, owners, states and tokens.
      device: keys and values, and its copy of the cells.
      config: sizes and types.
      policy: makes room when a sequence has outgrown it; None is no policy.
      extend: the rounds of SelfExtend in the cache; None without it.
      reached: `ga_i` by sequence: SelfExtend has divided positions up to it.
      checkpoints: makes them and writes them back; None is none.
      logits: what the next token of each sequence is sampled from.
      counts: of upkeep, for `Stats`.
      restored_select: sparse reads by which tokens of restored sequences were computed, see
        `Snapshot.select`.
    """

    def __init__(self, host: HostCells, device: Device, policy: Policy | None = None):
        """Takes both sides, empty.

        Raises:
          BadConfig: the policy or checkpoints do not fit the cache.
        """
        config: CacheConfig = device.spec.config
        if policy:
            checks.n_keep(policy.n_keep, config.n_ctx)
        self.host, self.device, self.config, self.policy = host, device, config, policy
        self.extend, self.reached = extend_schedule(config), dict[int, int]()
        self.checkpoints = open_checkpoints(host, device, config)
        self.logits = LastLogits()
        self.counts = Counts()
        self.restored_select: Mapping[str, Any] | None = None

    @property
    def traits(self) -> dict[str, str]:
        """Names that the rules of `kvrt.options.compose` refer to, and their words."""
        host, layout = self.host, self.device.layout
        found = {
            "one order": host.rolls or host.states is not None,
            "mesh": self.device.spec.shards is not None,
            "only slots of heads" if layout.scored else "no complete layer": not host.complete,
        }
        own = policy_traits(self.policy) | {name: "" for name, x in found.items() if x}
        return {**self.config.traits, **layer_traits(layout.groups, layout.recurrent), **own}

    def check_seq_id(self, seq_id: int) -> int:
        """Refuses a sequence that does not exist, else returns it; raises BadSequence."""
        return check_seq_id(seq_id, self.config.n_seq_max)

    # --- edits of sequences --------------------------------------------------------------------

    def apply(self, edit: SeqEdit) -> None:
        """Applies an edit; cells that other sequences share and that would move are copied first.

        Raises:
          BadSequence: a sequence does not exist.
        """
        for seq_id in edit.seq_ids:
            self.check_seq_id(seq_id)
        before = self.host.contents
        after, copies = contents.apply(before, edit)
        if contents.unmoved(before, after):
            return
        cuts = isinstance(edit, Keep) or (isinstance(edit, Remove) and edit.p1 is None)
        self.edited(after, [copies], "cut" if cuts else "changed")
        self.logits.apply(edit)
        if isinstance(edit, Copy) and edit.src in self.reached:
            # A copy has come as far as its source.
            self.reached[edit.dst] = max(self.reached[edit.src], self.reached.get(edit.dst, 0))

    def edited(
        self,
        after: CacheContents,
        copies: Iterable[Iterable[CellCopies]],
        reason: Literal["cut", "changed"] = "changed",
    ) -> None:
        """Replaces the contents by edited ones, for each edit after its cells were copied."""
        for some in copies:
            self.copy_cells(some)
        self.commit(after, reason)

    def commit(self, after: CacheContents, reason: Literal["evicted", "cut", "changed"]) -> None:
        """Replaces the contents, and takes note of the checkpoints that are lost by it."""
        gone = checkpoints.lost_positions(self.host.checkpoints, after.checkpoints)
        self.counts.lost_checkpoints += [
            LostCheckpoint(seq_id=s, pos=pos, reason=reason) for s, pos in gone
        ]
        self.host.commit(after)

    def note_reads(self, seq_id: int, first: int) -> None:
        """Notes which of the tokens from `first` on, computed one by one, have read some cells."""
        select, host = self.config.select, self.host
        assert select is not None, "asked where reads are sparse"
        p0 = host.first_sparse(select, seq_id, first)
        if p0 is not None:
            host.history = history.inexact(host.history, seq_id, p0)

    def can_remove(self, seq_id: int, p0: int, p1: int | None) -> bool:
        """See `Runtime.can_remove`."""
        self.check_seq_id(seq_id)
        edit = Remove(seq_id=seq_id, p0=p0, p1=p1)
        try:
            contents.apply(self.host.contents, edit)
        except CannotRewind:
            return self.resumes_at(edit) is not None
        return True

    # --- context checkpoints -------------------------------------------------------------------

    def add_checkpoint(self, seq_id: int) -> None:
        """Makes a checkpoint at the end of a sequence, if there is none and they are asked for."""
        if self.checkpoints is not None:
            self.flush()
            after = self.checkpoints.planned(seq_id)
            if after is not None:
                self.commit(after, "evicted")

    def resumes_at(self, edit: Remove) -> Checkpoint | None:
        """The checkpoint that a sequence is cut back to, for a removal that layers refuse.

        None if there is none before it, or what is between the two has holes and so cannot be
        evaluated again.
        """
        s, end = edit.seq_id, edit.p1
        if s is None or (end is not None and end <= self.host.pos_max(s)):
            return None
        found = checkpoints.nearest(self.host.checkpoints, s, edit.p0)
        if found is None:
            return None
        pos = history.positions(self.host.history, s)
        between = pos[(pos >= found.pos) & (pos < edit.p0)]
        return found if np.array_equal(between, np.arange(found.pos, edit.p0)) else None

    def rewind(self, seq_id: int, checkpoint: Checkpoint, n_again: int) -> None:
        """Cuts a sequence back to a checkpoint, after which n_again tokens will be appended.

        Raises:
          CacheFull: other sequences share cells, and there are too few for tokens of its own.
        """
        assert self.checkpoints is not None, "without them there is none"
        plan = plan_rewind(self.host.contents, seq_id, checkpoint)
        if not self.in_blocks(seq_id):
            n_free = contents.n_tokens_free(plan.contents)
            shifts = self.policy is not None
            checks.free_cells(n_again, n_free, self.config.n_ctx, shifts=shifts)
        self.checkpoints.write(plan, checkpoint)
        self.commit(plan.contents, "cut")
        self.logits.apply(Remove(seq_id=seq_id, p0=checkpoint.pos))
        self.counts.n_rewinds += 1
        self.counts.n_recomputed += n_again

    def clear(self) -> None:
        """See `Runtime.clear`."""
        self.forget()
        self.host.commit(contents.clear(self.host.contents))

    def forget(self) -> None:
        """Drops the logits and the progress of SelfExtend of all sequences."""
        self.logits.forget(None)
        self.reached.clear()

    @contextlib.contextmanager
    def without(self, seq_id: int, pos: int) -> Iterator[None]:
        """The cache without a sequence's tokens from `pos` on, for a step that writes nothing.

        Within it nothing may be written, moved or packed.

        Raises:
          CannotRewind: a layer does not keep what a token at `pos` has to see.
        """
        self.flush()
        before = self.host.contents
        after, _ = contents.apply(before, Remove(seq_id=seq_id, p0=pos))
        self.host.commit(after)
        try:
            self.upload()
            yield
        finally:
            self.host.commit(before)

    # --- sequences in blocks -------------------------------------------------------------------

    def in_blocks(self, seq_id: int) -> bool:
        """Whether a sequence lies in blocks."""
        return seq_id in self.host.in_blocks

    @property
    def may_lie_in_blocks(self) -> bool:
        """Whether no policy, nor SelfExtend, ever moves positions."""
        return not (self.policy or self.extend)

    def to_blocks(self, seq_id: int) -> int:
        """See `Runtime.to_blocks`."""
        self.check_seq_id(seq_id)
        check_together({"blocks": f"sequence {seq_id}"}, self.traits)
        after, copies = contents.to_blocks(self.host.contents, seq_id, self.config.block_size)
        self.copy_cells(copies)
        self.host.commit(after)
        return sum(len(src) for src, _ in copies)

    def to_cells(self, seq_id: int) -> None:
        """See `Runtime.to_cells`."""
        self.check_seq_id(seq_id)
        self.host.commit(contents.to_cells(self.host.contents, seq_id))

    def copy_on_write(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> None:
        """Moves sequences in blocks out of shared blocks that they are about to write to.

        Raises:
          CacheFull: sequences lie in blocks, and the tokens do not fit.
        """
        plan = self.host.plan_copy_on_write(seq_ids, first)
        if plan is not None:
            after, copies = plan
            self.copy_cells(copies)
            self.host.commit(after)

    # --- upkeep --------------------------------------------------------------------------------

    def defrag(self, *, by_sequence: bool = False) -> int:
        """See `Runtime.defrag`."""
        if self.host.blocks is not None:
            raise UsageError(
                f"defrag would tear blocks of sequences {sorted(self.host.blocks.seqs)} apart; "
                "take them out with to_cells first"
            )
        return sum(self._defrag(i, by_sequence=by_sequence) for i in range(len(self.host.groups)))

    def flush(self) -> None:
        """See `Runtime.flush`."""
        threshold = self.config.defrag_threshold
        for i, indexed in enumerate(self.host.groups):
            packs = indexed.stale and not indexed.group.rolls and indexed.group.blocks is None
            if packs and should_defrag(indexed.cells, threshold):
                self._defrag(i, by_sequence=False)
        self.upload()
        self.shift_keys()

    def shift_keys(self) -> None:
        """The K-shift, if keys are pending; the device has the cells."""
        if any(indexed.pending for indexed in self.host.groups):
            self.device.shift()
            for indexed in self.host.groups:
                indexed.settle()
            self.counts.n_kshift += 1

    def upload(self) -> None:
        """Replaces the device's cells that are out of date."""
        for i, indexed in enumerate(self.host.groups):
            if indexed.stale:
                self.device.upload(i, indexed.cells)
                indexed.stale = False

    def copy_cells(self, copies: Iterable[CellCopies]) -> None:
        """Copies keys and values from cell to cell, by group."""
        for group, (src, dst) in enumerate(copies):
            self.device.copy_kv(group, src, dst)

    def _defrag(self, group: int, *, by_sequence: bool) -> int:
        indexed = self.host.groups[group]
        cells, plan = plan_defrag(indexed.cells, by_sequence=by_sequence)
        for moves in plan.rounds:
            self.device.copy_kv(group, moves[:, 0], moves[:, 1])
        indexed.replace(dataclasses.replace(indexed.group, cells=cells, head=int(n_used(cells))))
        self.counts.n_defrag += plan.n_moves > 0
        return plan.n_moves


def open_cell_cache(
    model: Decoder,
    config: CacheConfig,
    place: Placement | None,
    policy: AnyPolicy | None = None,
) -> CellCache:
    """An empty cell cache for a model; with a policy it pins what that never drops.

    Raises:
      BadConfig: the policy, SelfExtend and what else is asked for do not go together, or with the
        model, or groups lack layers.
    """
    layers = layers_of(model, config, policy, {"mesh": ""} if place else {})
    drops = by_position(policy)
    n_pinned = drops.n_keep if drops else None
    layout = cell_layout(layers.groups, layers.recurrent, layers.config, n_pinned or 0)
    layout = dataclasses.replace(layout, scored=layers.scored)
    device = Device(model, layers.config, layout, place)
    host = HostCells(layers.groups, layers.recurrent, layers.config, n_pinned)
    return CellCache(host, device, drops)


def layers_of(
    model: Decoder, config: CacheConfig, policy: AnyPolicy | None, *others: Traits
) -> LayerKinds:
    """The layers of a model by what keeps them; raises BadConfig as `checks.together`."""
    specs: Sequence[GroupSpec] = model.groups  # pyright: ignore[reportAttributeAccessIssue]
    recurrent = model.recurrent  # pyright: ignore[reportAttributeAccessIssue]
    checks.together(specs, recurrent, config, policy, *others)
    scored = policy if isinstance(policy, ScoredPolicy) else None
    asked = query_heads(model) if scored and scored.observed_by.queries else {}
    return by_kind(specs, recurrent, config, scored, asked)

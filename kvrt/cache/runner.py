"""Steps of a cell cache, of one sequence or several: place, run, commit.

    place    cells for the tokens, after pending copies of shared blocks, packing and K-shifts
    run      a program: a step, a loop of them on the device, a step with drafts
    commit   the tokens that stay are in the host's cells, states and history

A step that raises before `commit` leaves no token.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kvrt.arrays import Array, Bool, Float, Int32
from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache.host_cells import SlotPlan
from kvrt.program import decode_loop
from kvrt.program.batch import Batch, bucket, padded, without_outputs
from kvrt.program.decode_loop import LoopSpec, Sampled
from kvrt.program.rounds.round import RoundSpec, plan_round
from kvrt.program.sample import Sampler

MaybeBools = Bool[np.ndarray, " n"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """Tokens that a sequence sampled in one run, on the host.

    Attributes:
      tokens: all of them; the last one is not in the cache.
      best_ids: the most probable ids where each was sampled.
      best: their log-probabilities.
      sampler: after the last token.
    """

    tokens: Int32[np.ndarray, " n"]
    best_ids: Int32[np.ndarray, "n K"]
    best: Float[np.ndarray, "n K"]
    sampler: Sampler


def read_run(sampled: Sampled, sampler: Sampler) -> Ran:
    """Fetches the tokens of a run of one sequence."""
    n = int(sampled.n_steps)  # sync: how far the run came, and the caller sees each token
    arrays = sampled.tokens, sampled.best_ids, sampled.best
    tokens, best_ids, best = (np.asarray(x)[:n, 0] for x in arrays)
    return Ran(tokens=tokens, best_ids=best_ids, best=best, sampler=sampler)


class Runner:
    """Runs steps in a cell cache."""

    def __init__(self, cache: CellCache):
        """Takes a cache, which others may edit between steps."""
        self._cache, self._host, self._device = cache, cache.host, cache.device
        self._n_ubatch, self._select = cache.config.n_ubatch, cache.config.select

    def place(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> SlotPlan:
        """Finds cells for new tokens, the first of each sequence at `first`; raises CacheFull."""
        if self._host.blocks is not None:
            self._cache.copy_on_write(seq_ids, first)
        if any(x.stale or x.pending for x in self._host.groups):
            self._cache.flush()
        return self._host.find(seq_ids, first)

    def batch(
        self, plan: SlotPlan, tokens: np.ndarray, pos: np.ndarray, wanted: Sequence[int], size: int
    ) -> Batch:
        """The arrays of a step of `size` tokens, padding included, with logits of those wanted."""
        where = self._host.places(plan, size)
        return padded(tokens, pos, plan.seq_ids, wanted, where, size)

    def commit(
        self, plan: SlotPlan, tokens: np.ndarray, pos: np.ndarray, stays: MaybeBools = None
    ) -> None:
        """Adds the tokens of a step that has run: all of a plan, or some that stay.

        Of each sequence those are the first ones; `tokens` and `pos` are theirs alone.
        """
        self._host.append(plan if stays is None else self._host.kept(plan, stays), pos, tokens)

    def forward(
        self, plan: SlotPlan, tokens: np.ndarray, pos: np.ndarray, wanted: Sequence[int]
    ) -> Array:
        """Runs a step that was placed; the logits of the tokens `wanted`."""
        batch = self.batch(plan, tokens, pos, wanted, bucket(len(tokens), self._n_ubatch))
        if not wanted and self._device.skips_unwanted:
            batch = without_outputs(batch)
        logits = self._device.forward(batch)
        return logits if len(logits) == len(wanted) else logits[: len(wanted)]

    def step(
        self, tokens: np.ndarray, pos: np.ndarray, seq_ids: np.ndarray, wanted: Sequence[int]
    ) -> Array:
        """Runs a step of tokens that stay; the logits of those `wanted`."""
        first = {int(s): int(p) for s, p in zip(seq_ids[::-1], pos[::-1], strict=True)}
        plan = self.place(seq_ids, first)
        for s in first:
            self._cache.logits.forget(s)
        logits = self.forward(plan, tokens, pos, wanted)
        self.commit(plan, tokens, pos)
        if self._select and len(tokens) == 1:
            self._cache.note_reads(int(seq_ids[0]), int(pos[0]))
        return logits

    def probe(self, tokens: np.ndarray, seq_id: int, first: int) -> Array:
        """The logits of tokens at `first` and behind, which leave no trace in states either."""
        self._cache.flush()
        plan = self._host.probe(np.full(len(tokens), seq_id, np.int32), {seq_id: first})
        pos, wanted = following(first, len(tokens)), range(len(tokens))
        if plan.states is None:
            return self.forward(plan, tokens, pos, wanted)
        index = int(plan.states.dst[0])
        held = self._device.take_state(index)
        try:
            return self.forward(plan, tokens, pos, wanted)
        finally:
            self._device.put_state(index, held)

    def loop(self, token: int, seq_id: int, loop: LoopSpec, n: int, sampler: Sampler) -> Ran:
        """Feeds a token and samples up to n, in one program of loop.stride steps."""
        plan, first = self._place_at_end(seq_id, n)
        where = self._host.places(plan, loop.stride, ahead=n > 1)
        run = decode_loop.plan_run((token, first), seq_id, where, loop.stop_ids, n)
        sampled, sampler = self._device.decode(run, sampler, loop.n_best)
        ran = read_run(sampled, sampler)
        self._commit_first(plan, first, [token, *ran.tokens[:-1].tolist()])
        if self._select:
            self._cache.note_reads(seq_id, first)
        return ran

    def round(
        self,
        tokens: Sequence[int],
        seq_id: int,
        size: int,
        stop_ids: Sequence[int],
        how: RoundSpec,
        sampler: Sampler,
    ) -> tuple[Ran, int]:
        """Feeds a token and its drafts in one step of `size`; what was sampled, drafts verified.

        Where layers draft any tokens hold the drafts' places.
        """
        plan, first = self._place_at_end(seq_id, len(tokens))
        where = self._host.places(plan, size, ahead=how.exit_layer is not None)
        step = plan_round(tokens, (seq_id, first), where, size, stop_ids, sampler)
        verified = self._device.verify(step, how)
        (newest,), (more,), (n_drafted,) = verified.read()
        # Drafts that stay are the tokens that were sampled.
        sampled, n = np.array([newest, *more], np.int32), len(more) + 1
        self._commit_first(plan, first, [tokens[0], *sampled[:-1].tolist()])
        best_ids, best = (np.asarray(x)[:n] for x in (verified.best_ids, verified.best))
        ran = Ran(tokens=sampled, best_ids=best_ids, best=best, sampler=verified.sampler)
        return ran, n_drafted

    def _place_at_end(self, seq_id: int, n: int) -> tuple[SlotPlan, int]:
        """Cells of n tokens at the end of a sequence, and the position of the first."""
        first = self._host.pos_max(seq_id) + 1
        plan = self.place(np.full(n, seq_id, np.int32), {seq_id: first})
        self._cache.logits.forget(seq_id)
        return plan, first

    def _commit_first(self, plan: SlotPlan, first: int, tokens: Sequence[int]) -> None:
        """Adds the first tokens of a plan of one sequence."""
        n, n_all = len(tokens), len(plan.seq_ids)
        stays = None if n == n_all else np.arange(n_all) < n
        self.commit(plan, np.array(tokens, np.int32), following(first, n), stays)


def following(first: int, n: int) -> Int32[np.ndarray, " n"]:
    """Positions of n tokens from `first` on."""
    return np.arange(first, first + n, dtype=np.int32)

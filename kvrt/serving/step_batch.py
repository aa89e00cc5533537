"""The tokens of one step of many sequences, where they lie in its arrays, and what it sampled.

First come the sequences that decode, a token each, padded to one for every sequence that may be
there; then the tokens of prompts, padded to a bucket, or those of rounds: the newest token of a
sequence and its drafts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvrt.arrays import Array, Bool, Int32
from kvrt.cells.slots import StepTokens, only_tokens
from kvrt.program.batch import bucket
from kvrt.program.rounds.round import Verified
from kvrt.serving.request import SeqState
from kvrt.serving.scheduling.step_plan import StepPlan


class Chunk(NamedTuple):
    """The next n tokens of a sample, from `start` on."""

    state: SeqState
    start: int
    n: int

    @property
    def seq_id(self) -> int:
        """Its sequence number."""
        assert self.state.seq_id is not None, "a sample that computes has a sequence number"
        return self.state.seq_id

    @property
    def pos(self) -> int:
        """The position of its first token."""
        return self.start - self.state.n_gone

    @property
    def n_before(self) -> int:
        """Tokens of the sample that are in the cache before it."""
        return self.start - self.state.n_dropped

    @property
    def end(self) -> int:
        """Tokens that are there afterwards."""
        return self.start + self.n


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch(StepTokens):
    """The tokens of one step, those of `decode` first, then the prompts' one after another.

    Attributes:
      decode: samples of which it is the last token; each reads a block list of its own.
      starts: tokens of each of those that come before it.
      prompts: tokens of the others, drafts included.
    """

    decode: tuple[SeqState, ...]
    starts: Int32[np.ndarray, " d"]
    prompts: tuple[Chunk, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All tokens by sample, in their order."""
        first = zip(self.decode, self.starts.tolist(), strict=True)
        return (*(Chunk(state, start, 1) for state, start in first), *self.prompts)

    @property
    def n_before(self) -> Int32[np.ndarray, " n"]:
        """How many tokens of its sequence are in the cache before each token.

        That is its position, but for sequences in which SelfExtend lets tokens share one.
        """
        chunks = self.chunks
        more = [c.n_before - c.pos for c in chunks]
        return self.pos + np.repeat(np.array(more, np.int32), [c.n for c in chunks])

    def kept(self, n_kept: Mapping[SeqState, int]) -> "tuple[StepBatch, Bool[np.ndarray, ' n']]":
        """The step without drafts that do not stay, and which of its tokens do.

        Args:
          n_kept: tokens that stay of each sample, the first ones.
        """
        single = np.array([n_kept[s] > 0 for s in self.decode], bool)
        behind = [np.arange(c.n) < n_kept[c.state] for c in self.prompts]
        stays = np.concatenate([single, *behind])
        decode = tuple(s for s in self.decode if n_kept[s])
        left = only_tokens(
            self,
            stays,
            decode=decode,
            starts=self.starts[single],
            prompts=tuple(c._replace(n=n_kept[c.state]) for c in self.prompts if n_kept[c.state]),
            n_single=len(decode),
        )
        return left, stays

    def last(self) -> dict[SeqState, int]:
        """By sample, where the last of its tokens stands."""
        found = dict(zip(self.decode, range(len(self.decode)), strict=True))
        end = self.n_lists
        for c in self.prompts:
            end += c.n
            found[c.state] = end - 1
        return found

    def ends(self, size: int) -> list[tuple[SeqState, int]]:
        """Samples, and how many tokens they have: all prompts, and who fills a block of `size`."""
        n = len(self.decode)
        full = np.flatnonzero(self.pos[:n] % size == size - 1).tolist()
        decode = [(self.decode[i], int(self.starts[i]) + 1) for i in full]
        return [*decode, *((c.state, c.end) for c in self.prompts)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that was dispatched, and what it sampled, which nobody has read yet.

    Attributes:
      plan: of it.
      step: its tokens, all drafts included.
      states: samples that get tokens, in the order of the outputs; those with drafts are last.
      tokens: a token of each, padded.
      verified: all that was sampled where some have drafts; None where nobody has.
      logits: of the outputs; those of drafts are behind those of the samples.
      start: when it was planned, in seconds.
      ahead: whether the step before it was not read yet.
    """

    plan: StepPlan
    step: StepBatch
    states: Sequence[SeqState]
    tokens: Array
    verified: Verified | None
    logits: Array
    start: float
    ahead: bool


def step_batch(
    plan: StepPlan,
    n_seq_max: int,
    n_batch: int,
    n_rounds: int | None = None,
    *,
    cached_early: bool = False,
) -> StepBatch:
    """The tokens of a plan for n_seq_max sequences and n_batch tokens a step at most.

    With drafts those of prompts and rounds are padded to n_rounds; see `StepTokens.cached_early`.
    """
    # The last token of a prompt reads all, whether it is alone in its step or not.
    ends = [s for s in plan.decode if s.reads_sparsely and s.n_computed < s.n_prompt]
    decode = tuple(s for s in plan.decode if s not in plan.drafts and s not in ends)
    prompts = tuple(Chunk(*x) for x in plan.prompts)
    prompts += tuple(Chunk(s, s.n_computed, 1) for s in ends)
    prompts += tuple(Chunk(s, s.n_computed, len(x) + 1) for s, x in plan.drafts.items())
    ids, seq_ids = [s.tokens[s.n_computed] for s in decode], [s.seq_id for s in decode]
    starts = np.array([s.n_computed for s in decode], np.int32)
    pos = starts - np.array([s.n_gone for s in decode], np.int32)
    for c in prompts:
        ids += c.state.tokens[c.start : c.end]
        ids += plan.drafts.get(c.state, ())
    n_prompt = len(ids) - len(decode)
    n_padded = n_rounds or (bucket(n_prompt, n_batch) if n_prompt else 0)
    return StepBatch(
        decode=decode,
        starts=starts,
        prompts=prompts,
        tokens=np.array(ids, np.int32),
        pos=_joined(pos, [np.arange(c.pos, c.pos + c.n, dtype=np.int32) for c in prompts]),
        seq_ids=_joined(
            np.array(seq_ids, np.int32), [np.full(c.n, c.seq_id, np.int32) for c in prompts]
        ),
        size=n_seq_max + n_padded,
        n_single=len(decode),
        n_lists=n_seq_max,
        cached_early=cached_early,
    )


def _joined(first: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([first, *others]) if others else first

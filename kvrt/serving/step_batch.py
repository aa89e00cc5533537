"""The tokens of one step of many sequences, and where they lie in its arrays.

First come the sequences that decode, a token each, padded to one for every sequence that may be
there; then the tokens of prompts, padded to a bucket, or those of rounds: the newest token of a
sequence and its drafts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.program.batch import bucket
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
        return self.start - self.state.n_behind

    @property
    def n_before(self) -> int:
        """Tokens of the sample that are in the cache before it."""
        return self.start - self.state.n_dropped

    @property
    def end(self) -> int:
        """Tokens that are there afterwards."""
        return self.start + self.n


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The tokens of one step.

    Attributes:
      decode: samples of which it is the last token.
      starts: tokens of each of those that come before it.
      prompts: tokens of the others, drafts included.
      tokens: ids, those of decode first, then the prompts' one after another.
      pos: positions likewise.
      seq_ids: sequences likewise.
      n_seq_max: tokens of decode that the arrays begin with, padding included.
      n_prompt: tokens of prompts, padding included.
      cached_early: whether tokens of prompts are cached before later ones of the step read them.
    """

    decode: tuple[SeqState, ...]
    starts: Int32[np.ndarray, " d"]
    prompts: tuple[Chunk, ...]
    tokens: Int32[np.ndarray, " n"]
    pos: Int32[np.ndarray, " n"]
    seq_ids: Int32[np.ndarray, " n"]
    n_seq_max: int
    n_prompt: int
    cached_early: bool = False

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All tokens by sample, in their order."""
        first = zip(self.decode, self.starts.tolist(), strict=True)
        return (*(Chunk(state, start, 1) for state, start in first), *self.prompts)

    @property
    def first(self) -> dict[int, int]:
        """By sequence, the position of its first token."""
        n = len(self.decode)
        found = dict(zip(self.seq_ids[:n].tolist(), self.pos[:n].tolist(), strict=True))
        return found | {c.seq_id: c.pos for c in self.prompts}

    @property
    def n_before(self) -> Int32[np.ndarray, " n"]:
        """How many tokens of its sequence are in the cache before each token.

        That is its position, but for sequences in which SelfExtend lets tokens share one.
        """
        chunks = self.chunks
        more = [c.n_before - c.pos for c in chunks]
        return self.pos + np.repeat(np.array(more, np.int32), [c.n for c in chunks])

    @property
    def size(self) -> int:
        """Tokens of the step, padding included (T)."""
        return self.n_seq_max + self.n_prompt

    def spread(self, values: Int32[np.ndarray, " n"], fill: int) -> Int32[np.ndarray, " T"]:
        """Values a token at their places in the step's arrays."""
        out, n = np.full(self.size, fill, np.int32), len(self.decode)
        out[:n] = values[:n]
        out[self.n_seq_max : self.n_seq_max + len(values) - n] = values[n:]
        return out

    def prompt_blocks(
        self, blocks: np.ndarray, slots: Int32[np.ndarray, " n"], block_size: int
    ) -> np.ndarray:
        """The blocks that tokens of prompts read, each once.

        Args:
          blocks: of what was cached before the step.
          slots: of the step's tokens, which are read where they are `cached_early`.
          block_size: cells of a block.
        """
        if not self.cached_early:
            return blocks
        own = slots[len(self.decode) :] // block_size
        return np.array(list(dict.fromkeys([*blocks.tolist(), *own.tolist()])), np.int32)

    def kept(self, n_kept: Mapping[SeqState, int]) -> "tuple[StepBatch, Bool[np.ndarray, ' n']]":
        """The step without drafts that do not stay, and which of its tokens do.

        Args:
          n_kept: tokens that stay of each sample, the first ones.
        """
        decode = np.array([n_kept[s] > 0 for s in self.decode], bool)
        behind = [np.arange(c.n) < n_kept[c.state] for c in self.prompts]
        stays = np.concatenate([decode, *behind])
        prompts = (c._replace(n=n_kept[c.state]) for c in self.prompts if n_kept[c.state])
        left = dataclasses.replace(
            self,
            decode=tuple(s for s in self.decode if n_kept[s]),
            starts=self.starts[decode],
            prompts=tuple(prompts),
            **{x: getattr(self, x)[stays] for x in ("tokens", "pos", "seq_ids")},
        )
        return left, stays

    def last(self) -> dict[SeqState, int]:
        """By sample, where the last of its tokens stands."""
        found = dict(zip(self.decode, range(len(self.decode)), strict=True))
        end = self.n_seq_max
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


def step_batch(
    plan: StepPlan,
    n_seq_max: int,
    n_batch: int,
    n_rounds: int | None = None,
    *,
    cached_early: bool = False,
) -> StepBatch:
    """The tokens of a plan for n_seq_max sequences and n_batch tokens a step at most.

    With drafts those of prompts and rounds are padded to n_rounds; see `StepBatch.cached_early`.
    """
    # The last token of a prompt reads all, whether it is alone in its step or not.
    ends = [s for s in plan.decode if s.reads_sparsely and s.n_computed < s.n_prompt]
    decode = tuple(s for s in plan.decode if s not in plan.drafts and s not in ends)
    prompts = tuple(Chunk(*x) for x in plan.prompts)
    prompts += tuple(Chunk(s, s.n_computed, 1) for s in ends)
    prompts += tuple(Chunk(s, s.n_computed, len(x) + 1) for s, x in plan.drafts.items())
    ids, seq_ids = [s.tokens[s.n_computed] for s in decode], [s.seq_id for s in decode]
    starts = np.array([s.n_computed for s in decode], np.int32)
    pos = starts - np.array([s.n_behind for s in decode], np.int32)
    for c in prompts:
        ids += c.state.tokens[c.start : c.end]
        ids += plan.drafts.get(c.state, ())
    n_prompt = len(ids) - len(decode)
    return StepBatch(
        decode=decode,
        starts=starts,
        prompts=prompts,
        tokens=np.array(ids, np.int32),
        pos=_joined(pos, [np.arange(c.pos, c.pos + c.n, dtype=np.int32) for c in prompts]),
        seq_ids=_joined(
            np.array(seq_ids, np.int32), [np.full(c.n, c.seq_id, np.int32) for c in prompts]
        ),
        n_seq_max=n_seq_max,
        n_prompt=n_rounds or (bucket(n_prompt, n_batch) if n_prompt else 0),
        cached_early=cached_early,
    )


def _joined(first: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([first, *others]) if others else first

"""The tokens of one step of many sequences, and where they lie in its arrays.

First come rows, a token each of sequences that decode, padded to one for every sequence that may
be there; then the tokens of prompts, padded to a bucket.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrt.arrays import Int32
from kvrt.program import batch as plans
from kvrt.serving.request import State
from kvrt.serving.step_plan import StepPlan


class Chunk(NamedTuple):
    """The next n tokens of a state, from `start` on."""

    state: State
    start: int
    n: int

    @property
    def row(self) -> int:
        """The sequence."""
        assert self.state.row is not None, "a state that computes has a row"
        return self.state.row

    @property
    def end(self) -> int:
        """Tokens that are there afterwards."""
        return self.start + self.n


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One step.

    Attributes:
      decode: chunks of one token.
      prompts: the others.
      tokens: ids, those of decode first, then the prompts' one after another.
      pos: positions likewise.
      rows: sequences likewise.
      n_rows: rows that the arrays begin with.
      n_prompt: tokens of prompts, padded.
    """

    decode: tuple[Chunk, ...]
    prompts: tuple[Chunk, ...]
    tokens: Int32[np.ndarray, " n"]
    pos: Int32[np.ndarray, " n"]
    rows: Int32[np.ndarray, " n"]
    n_rows: int
    n_prompt: int

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All of them, in the order of their tokens."""
        return self.decode + self.prompts

    @property
    def size(self) -> int:
        """Tokens of the step, padding included (T)."""
        return self.n_rows + self.n_prompt

    def spread(self, values: Int32[np.ndarray, " n"], fill: int) -> Int32[np.ndarray, " T"]:
        """Values a token at their places in the step's arrays."""
        out, n = np.full(self.size, fill, np.int32), len(self.decode)
        out[:n] = values[:n]
        out[self.n_rows : self.n_rows + len(values) - n] = values[n:]
        return out

    def last(self) -> dict[State, int]:
        """By state, where the last of its tokens stands."""
        found = {c.state: i for i, c in enumerate(self.decode)}
        end = self.n_rows
        for c in self.prompts:
            end += c.n
            found[c.state] = end - 1
        return found


def work(plan: StepPlan, n_rows: int, n_batch: int) -> Work:
    """The tokens of a plan; `n_rows` sequences may be there, and a step has n_batch tokens."""
    decode = tuple(Chunk(s, s.n_computed, 1) for s in plan.decode)
    prompts = tuple(Chunk(*x) for x in plan.prompts)
    ids = [c.state.tokens[c.start] for c in decode]
    for c in prompts:
        ids += c.state.tokens[c.start : c.end]
    n_prompt = len(ids) - len(decode)
    return Work(
        decode=decode,
        prompts=prompts,
        tokens=np.array(ids, np.int32),
        pos=_joined(
            np.array([c.start for c in decode], np.int32),
            [np.arange(c.start, c.end, dtype=np.int32) for c in prompts],
        ),
        rows=_joined(
            np.array([c.row for c in decode], np.int32),
            [np.full(c.n, c.row, np.int32) for c in prompts],
        ),
        n_rows=n_rows,
        n_prompt=plans.bucket(n_prompt, n_batch) if n_prompt else 0,
    )


def _joined(first: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([first, *others]) if others else first

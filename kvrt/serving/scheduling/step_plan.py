"""The rules of a scheduler, and what it decided for one step."""

import dataclasses
from typing import Literal, get_args

from kvrt.errors import BadConfig
from kvrt.policies import Due
from kvrt.serving.request import SeqState
from kvrt.serving.scheduling.queue import Order
from kvrt.whole_numbers import take_whole_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """How a scheduler decides.

    Attributes:
      n_batch: tokens a step.
      n_ctx_seq: tokens of one request at most, its output included; None is what the cache holds.
        The lower, the narrower are the block tables of each step. It is the context that the policy
        of a request works in.
      n_chunk: tokens of one prompt a step while others want some; None for no limit.
      order: by arrival ("fcfs"); by priority and then arrival; by the longest cached prefix
        ("lpm"; by arrival above 128 that wait); or in rounds of all who wait: depth-first over the
        tree of their prompts, heaviest subtrees first ("dfs"), or by groups of one shared prefix,
        those that decode most for their prompts first ("batchllm"). That one is for offline
        batches: a request is admitted when the cache has room for all that it and those who run
        may ever hold, in tokens, ends of blocks not counted. Each by a prefix implies by_prefix.
      n_wait: by priority and by the longest cached prefix, the bound on waiting. A request that
        was passed over in so many steps is admitted to the next room that is free, before all that
        came in a later step, whatever their priority. So it starts after at most n_wait steps, or
        once all that came before it have started where that is later, and then as soon as the first
        of those who run ends. None is no bound: it waits for as long as better ones come.
      preempt: a request that is preempted is computed again, or offloaded to a tier where it can.
      admit: what must fit at once for a request to be admitted: its next chunk, its tokens so far,
        or all that it may ever hold. The more, the fewer are preempted, and the fewer run at once.
      by_prefix: requests that share a prefix run together, and those that can use what a running
        one is about to compute wait for it.
      n_alike: tokens of a shared prefix that make this worthwhile, a multiple of the block size.
    """

    n_batch: int
    n_ctx_seq: int | None = None
    n_chunk: int | None = None
    order: Order = "fcfs"
    n_wait: int | None = 256
    preempt: Literal["recompute", "swap"] = "recompute"
    admit: Literal["chunk", "text", "whole"] = "text"
    by_prefix: bool = False
    n_alike: int = 16

    def __post_init__(self) -> None:
        """Refuses counts below 1."""
        take_whole_numbers(self)
        for name in ("n_batch", "n_ctx_seq", "n_chunk", "n_wait", "n_alike"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadConfig(f"{name} is {value}; it must be at least 1")
        if self.order not in get_args(Order):
            raise BadConfig(f"order {self.order!r}; one of {', '.join(get_args(Order))}")

    @property
    def holds_back(self) -> bool:
        """Whether those that can use what a running one is about to compute wait for it."""
        return self.by_prefix or self.order not in ("fcfs", "priority")


@dataclasses.dataclass(slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
      n_left: tokens of the budget that nobody uses.
      decode: samples of which the step computes the last token.
      prompts: samples, and [start, start + n) of their tokens.
      admitted: samples that were admitted; their n_computed is the prefix hit.
      preempted: samples that were preempted, in order.
      offloaded: those of them whose tokens went to a tier.
      forks: a sample whose prompt ends in this step, and another one of the request that shares the
        prompt after it: both sample from the same logits.
      refused: samples that ended because there is no room for them; each has an error.
      edited: samples whose schedule changed positions, how long they were, and what was due.
      drafts: of some samples of `decode`, tokens that may follow, which the step verifies beside
        its other tokens.
    """

    n_left: int
    decode: list[SeqState] = dataclasses.field(default_factory=list)
    prompts: list[tuple[SeqState, int, int]] = dataclasses.field(default_factory=list)
    admitted: list[SeqState] = dataclasses.field(default_factory=list)
    preempted: list[SeqState] = dataclasses.field(default_factory=list)
    offloaded: list[SeqState] = dataclasses.field(default_factory=list)
    forks: list[tuple[SeqState, SeqState]] = dataclasses.field(default_factory=list)
    refused: list[SeqState] = dataclasses.field(default_factory=list)
    edited: list[tuple[SeqState, int, Due]] = dataclasses.field(default_factory=list)
    drafts: dict[SeqState, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Tokens that the step computes beside drafts."""
        return len(self.decode) + sum(n for _, _, n in self.prompts)

    @property
    def ending(self) -> list[SeqState]:
        """Samples whose last token the step computes, so that there are logits to sample from."""
        return [*self.decode, *(s for s, start, n in self.prompts if start + n == len(s.tokens))]

    def compute(self, state: SeqState, n: int) -> None:
        """Adds the next n tokens of a sample."""
        if len(state.tokens) - state.n_computed == 1:
            self.decode.append(state)
        else:
            self.prompts.append((state, state.n_computed, n))
        self.n_left -= n

    def drop(self, state: SeqState) -> None:
        """Takes a sample out again."""
        if state in self.decode:
            self.decode.remove(state)
            self.n_left += 1
        self.n_left += sum(n for s, _, n in self.prompts if s is state)
        self.prompts = [p for p in self.prompts if p[0] is not state]

"""How an engine serves: its rules and its tiers."""

import dataclasses
import functools
from pathlib import Path
from typing import Literal, get_args

from kvrt.errors import BadConfig
from kvrt.files import kinds
from kvrt.options.option import check_limits, option
from kvrt.whole_numbers import take_whole_numbers

Order = Literal["fcfs", "priority", "lpm", "dfs", "batchllm"]
Eviction = Literal["lru", "arc"]

_serve = functools.partial(option, group="Serving", decides=None)
_more = functools.partial(option, group="Serving", decides=None, advanced=True)
_rule = functools.partial(option, group="Scheduling", decides=None, advanced=True)


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

    n_batch: int = _serve(
        dataclasses.MISSING,
        "tokens of a step, prefill and decode together",
        "N",
        short="b",
        low=1,
        cli=512,
        aliases=("n_ubatch",),
        decides=("grp_attn_n",),
        limits=True,
    )
    n_ctx_seq: int | None = _serve(
        None,
        "tokens of one request at most, its answer included; 0 is all that -c holds",
        "N",
        none_at=0,
        low=1,
        limits=True,
    )
    n_chunk: int | None = _rule(
        None,
        "tokens of one prompt in a step while others want some; 0 is all that -b leaves",
        "N",
        none_at=0,
        low=1,
    )
    order: Order = _rule(
        "fcfs",
        "by arrival (fcfs), by priority and then arrival, by the longest cached prefix (lpm), "
        "depth-first over all prompts (dfs), or by groups of a shared prefix (batchllm)",
        cli="priority",
    )
    n_wait: int | None = _rule(
        256,
        "with --order priority or lpm: steps in which others may go before one; 0 is no bound",
        "N",
        none_at=0,
        low=1,
    )
    preempt: Literal["recompute", "swap"] = _rule(
        "recompute",
        "a request that has to make room is computed again later, or offloaded to --host_cache",
    )
    admit: Literal["chunk", "text", "whole"] = _rule(
        "text",
        "what must fit for a request to begin: its next chunk, its tokens so far, or all that it "
        "may ever hold; the more, the fewer are preempted and the fewer run at once",
    )
    by_prefix: bool = _rule(
        False, "schedule requests with a common prefix together", flag="group_by_prefix"
    )
    n_alike: int = _rule(
        16,
        "with --group_by_prefix: tokens of a common prefix that make it worthwhile, a multiple of "
        "--block_size in paged mode",
        "N",
        low=1,
    )

    def __post_init__(self) -> None:
        """Refuses counts below 1."""
        take_whole_numbers(self)
        check_limits(self)
        if self.order not in get_args(Order):
            raise BadConfig(f"order {self.order!r}; one of {', '.join(get_args(Order))}")

    @property
    def holds_back(self) -> bool:
        """Whether those that can use what a running one is about to compute wait for it."""
        return self.by_prefix or self.order not in ("fcfs", "priority")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Where blocks go beyond the device.

    Attributes:
      host_bytes: memory of the host for blocks, of all pools.
      disk: a folder for blocks that the host has; None for none.
      disk_bytes: of the files in it.
      policy: which block goes first.
      always: takes blocks from a tier even where computing them again is measured to be faster.
    """

    host_bytes: int = _serve(
        dataclasses.MISSING,
        "host memory that evicted blocks are offloaded to, like 2GB; --mode cell has blocks then",
        "SIZE",
        flag="host_cache",
        cli=None,
        cli_type=str | None,
        size=True,
    )
    disk: Path | None = _serve(
        None,
        "with --host_cache: a folder that they are offloaded to as well, for later commands too",
        "FOLDER",
        flag="disk_cache",
        cli_type=str | None,
        file=kinds.BLOCKS,
    )
    disk_bytes: int = _more(
        0,
        "what the files of --disk_cache may take",
        "SIZE",
        flag="disk_cache_size",
        cli="10GB",
        cli_type=str,
        size=True,
    )
    policy: Eviction = _more(
        "lru",
        "which block of a tier is evicted first: the one used least recently, or by how often too",
        flag="eviction_policy",
    )
    always: bool = _more(
        False,
        "take blocks from a tier even where computing them again was measured to be faster",
        flag="always_load",
    )

    def __post_init__(self) -> None:
        """Refuses tiers without room."""
        take_whole_numbers(self)
        if self.host_bytes < 1 or (self.disk is not None and self.disk_bytes < 1):
            raise BadConfig(
                f"tiers of {self.host_bytes} bytes on the host and {self.disk_bytes} on the disk; "
                "each that is used needs room"
            )

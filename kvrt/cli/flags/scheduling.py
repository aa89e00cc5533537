"""The flags of who is served first, and of where blocks go that the device has no room for."""

import functools
from typing import Literal

from kvrt.cli.flags.declare import Options, flag, flag_group
from kvrt.cli.report.size import parse_size
from kvrt.errors import UsageError
from kvrt.files import kinds

# Those of `kvrt.serving` and `kvrt.paged`, which no help text waits for.
Order = Literal["fcfs", "priority", "lpm", "dfs", "batchllm"]
Preempt = Literal["recompute", "swap"]
Admit = Literal["chunk", "text", "whole"]
Eviction = Literal["lru", "arc"]

_rule = functools.partial(flag, "Scheduling", advanced=True)
_tier = functools.partial(flag, "Serving")
_more = functools.partial(flag, "Serving", advanced=True)


@flag_group
class RuleFlags(Options):
    """Who is served first, and what a step gives to whom."""

    group_by_prefix: bool = _rule(False, "schedule requests with a common prefix together")
    n_alike: int = _rule(
        16,
        "with --group_by_prefix: tokens of a common prefix that make it worthwhile, a multiple of "
        "--block_size in paged mode",
        "N",
        low=1,
    )
    order: Order = _rule(
        "priority",
        "by arrival (fcfs), by priority and then arrival, by the longest cached prefix (lpm), "
        "depth-first over all prompts (dfs), or by groups of a shared prefix (batchllm)",
    )
    n_wait: int = _rule(
        256,
        "with --order priority or lpm: steps in which others may go before one; 0 is no bound",
        "N",
    )
    n_chunk: int = _rule(
        0, "tokens of one prompt in a step while others want some; 0 is all that -b leaves", "N"
    )
    admit: Admit = _rule(
        "text",
        "what must fit for a request to begin: its next chunk, its tokens so far, or all that it "
        "may ever hold; the more, the fewer are preempted and the fewer run at once",
    )
    preempt: Preempt = _rule(
        "recompute",
        "a request that has to make room is computed again later, or offloaded to --host_cache",
    )


@flag_group
class TierFlags(Options):
    """Where blocks go that the device has no room for."""

    host_cache: str | None = _tier(
        None,
        "in paged mode: host memory that evicted blocks are offloaded to, like 2GB",
        "SIZE",
    )
    disk_cache: str | None = _tier(
        None,
        "with --host_cache: a folder that they are offloaded to as well, for later commands too",
        "FOLDER",
        file=kinds.BLOCKS,
    )
    disk_cache_size: str = _more("10GB", "what the files of --disk_cache may take", "SIZE")
    eviction_policy: Eviction = _more(
        "lru",
        "which block of a tier is evicted first: the one used least recently, or by how often too",
    )
    always_load: bool = _more(
        False, "take blocks from a tier even where computing them again was measured to be faster"
    )

    def check(self) -> None:
        """Refuses tiers without room, and what says something of tiers where there are none."""
        super().check()
        self.host_bytes()
        self.disk_bytes()
        if self.host_cache is not None:
            return
        if self.disk_cache is not None:
            raise UsageError("--disk_cache takes its blocks from the host; add --host_cache SIZE")
        for name in ("disk_cache_size", "eviction_policy", "always_load"):
            if name in self.given:
                raise UsageError(f"--{name} is for tiers, and there is none; add --host_cache SIZE")
        if isinstance(self, RuleFlags) and self.preempt == "swap":
            raise UsageError("--preempt swap offloads to the host; add --host_cache SIZE")

    def host_bytes(self) -> int | None:
        """Memory of the host for blocks; None for none."""
        return None if self.host_cache is None else parse_size("--host_cache", self.host_cache)

    def disk_bytes(self) -> int:
        """Room on the disk for them."""
        return parse_size("--disk_cache_size", self.disk_cache_size)

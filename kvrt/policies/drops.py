"""The schedule of a policy: drops where a sequence outgrows its context."""

import dataclasses
import functools
from collections.abc import Iterator

from kvrt.cells.edits import SeqEdit
from kvrt.policies.policy import Drop, Policy
from kvrt.policies.schedule import Due, SeqCounts, drop_edits

# Drops in which a policy evicts all that it may, where each of them rounds keys again.
_PARTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropSchedule:
    """A policy, and what a sequence has to itself.

    A K-shift rounds the keys that it moves to their KV dtype again. Where every token dropped one,
    a key would be rounded as often as it has neighbours; where it does, a quarter of what may go
    goes at once, and a key is rounded four times.

    Attributes:
      policy: what to drop, and when.
      n_ctx: tokens that may be in the cache at once.
      n_step: tokens of a part, at most, of a prompt that is longer than the context.
      requantizes: `CacheConfig.requantizes`, whether a K-shift rounds keys again.
      n_left: the fewest tokens that a drop leaves of the sequence, see `left_of`.
    """

    policy: Policy
    n_ctx: int
    n_step: int
    requantizes: bool = False
    n_left: int = 0

    drops = True

    @property
    def n_keep(self) -> int:
        """See `Schedule`."""
        return self.policy.n_keep

    @property
    def n_most(self) -> int:
        """See `Schedule`."""
        return self.policy.n_fit(self.n_ctx, 0)

    @functools.cached_property
    def n_least(self) -> int:
        """Tokens that fit beside those that drops leave; below 1 nothing can go on.

        A policy that drops half of what it may leaves one beyond those that it never drops.
        """
        n_past = self.n_ctx
        while (drop := self.policy.drop(n_past, self.n_ctx)) is not None:
            n_past -= drop.n
        return self.policy.n_fit(self.n_ctx - n_past, n_past)

    def n_part(self, n_prompt: int) -> int:
        """Tokens of a prompt to make room for at once: all, or a step's where not all can stay."""
        return n_prompt if n_prompt <= self.n_most else min(self.n_least, self.n_step)

    def due(self, counts: SeqCounts) -> Due:
        """See `Schedule`: room for a part of the prompt, or for one token."""
        left, n_new, n_past = counts.n_prompt - counts.n_computed, counts.n_new, counts.n_past
        if n_new is None:
            n_new = min(self.n_part(counts.n_prompt), left) if left > 0 else 1
        n_free = self.n_ctx - n_past if counts.n_free is None else counts.n_free
        edits: list[SeqEdit] = []
        for drop in self._drops(n_past, n_new, n_free):
            edits += drop_edits(counts.seq_id, drop)
            n_past, n_free = n_past - drop.n, n_free + drop.n
        n_until = counts.n_computed + n_new
        if n_new >= left:
            n_until += max(self.policy.n_fit(n_free - n_new, n_past + n_new), 0)
        return Due(edits=edits, n_until=n_until)

    def events(self, n_prompt: int, n_whole: int) -> Iterator[tuple[int, Drop]]:
        """Drops of a sequence of n_whole tokens, and its length before each, until they recur."""
        counts, seen = SeqCounts(seq_id=0, n_prompt=n_prompt, n_computed=0), set[int]()
        while counts.n_computed < n_whole:
            n_past, n_gone = counts.n_past, counts.n_gone
            if counts.n_computed >= n_prompt:
                if n_past in seen:
                    return
                seen.add(n_past)
            due = self.due(counts)
            for drop in due.drops:
                yield n_past, drop
                n_past -= drop.n
                n_gone += drop.n
            counts = counts._replace(n_computed=due.n_until, n_gone=n_gone)

    def left_of(self, n_prompt: int, n_whole: int) -> int:
        """The fewest tokens that a drop leaves of such a sequence; `n_most` without a drop."""
        events = self.events(n_prompt, n_whole)
        return min((n_past - drop.n for n_past, drop in events), default=self.n_most)

    def endless(self) -> "DropSchedule":
        """The schedule of an endless sequence that begins with one token."""
        return dataclasses.replace(self, n_left=self.left_of(1, 4 * self.n_ctx))

    def _drops(self, n_past: int, n_new: int, n_free: int) -> Iterator[Drop]:
        """What goes of n_past tokens so that n_new may follow, or as much as can."""
        n_fit = self.policy.n_fit(n_free, n_past)
        if n_fit < n_new and self.requantizes:
            n_new = max(n_new, -(-(n_past - self.n_keep) // _PARTS))
        while n_fit < n_new and (drop := self.policy.drop(n_past, n_new)) is not None:
            n_past, n_free = n_past - drop.n, n_free + drop.n
            if (after := self.policy.n_fit(n_free, n_past)) <= n_fit:
                return
            yield drop
            n_fit = after

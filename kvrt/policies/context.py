"""A policy over a sequence that has a context of its own: which positions go, and when.

All of it follows from counts, so that it is decided before anything is computed, and the same
whoever shares the cache. `cache.room` decides for a sequence whose cells others may share.
"""

import dataclasses
import functools
from collections.abc import Iterator

from kvrt.policies.policy import Drop, Policy

# Drops in which a policy evicts all that it may, where each of them rounds keys again.
_PARTS = 4


def n_at_once(n_droppable: int, *, requantizes: bool) -> int:
    """Tokens to make room for at least, when some of n_droppable have to go.

    A K-shift rounds the keys that it moves to their KV dtype again. Where every token dropped one,
    a key would be rounded as often as it has neighbours; with a quarter at once it is four times.
    """
    return -(-n_droppable // _PARTS) if requantizes else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advance:
    """What has to go before a sequence goes on, and how far it then comes.

    Attributes:
      drops: in their order.
      n_until: tokens of the sequence, dropped ones included, up to which nothing else has to go.
    """

    drops: tuple[Drop, ...]
    n_until: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyContext:
    """A policy, and what a sequence has to itself.

    Attributes:
      policy: what to drop, and when.
      n_ctx: tokens that may be in the cache at once.
      n_step: tokens of a part, at most, of a prompt that is longer than the context.
      requantizes: `CacheConfig.requantizes`, whether a K-shift rounds keys again.
    """

    policy: Policy
    n_ctx: int
    n_step: int
    requantizes: bool = False

    @property
    def n_most(self) -> int:
        """Tokens that are in the cache at most."""
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

    def advance(self, n_prompt: int, n_computed: int, n_dropped: int) -> Advance:
        """What goes before the next tokens of a sequence: a part of the prompt, or one token.

        Args:
          n_prompt: tokens of its prompt.
          n_computed: tokens that were computed: none, or as many as `n_until` said last.
          n_dropped: those of them that are gone.
        """
        left = n_prompt - n_computed
        n_new = min(self.n_part(n_prompt), left) if left > 0 else 1
        drops = self._drops(n_computed - n_dropped, n_new)
        n_until = n_computed + n_new
        if n_until >= n_prompt:
            n_past = n_until - n_dropped - sum(drop.n for drop in drops)
            n_until += max(self._n_fit(n_past), 0)
        return Advance(drops=drops, n_until=n_until)

    def events(self, n_prompt: int, n_whole: int) -> Iterator[tuple[int, Drop]]:
        """Drops of a sequence of n_whole tokens, and its length before each, until they recur."""
        n_computed = n_dropped = 0
        seen: set[int] = set()
        while n_computed < n_whole:
            n_past = n_computed - n_dropped
            if n_computed >= n_prompt:
                if n_past in seen:
                    return
                seen.add(n_past)
            found = self.advance(n_prompt, n_computed, n_dropped)
            for drop in found.drops:
                yield n_past, drop
                n_past -= drop.n
                n_dropped += drop.n
            n_computed = found.n_until

    @property
    def n_left_endless(self) -> int:
        """The fewest tokens that a drop leaves of an endless sequence that begins with one."""
        return self.n_left(1, 4 * self.n_ctx)

    def n_left(self, n_prompt: int, n_whole: int) -> int:
        """The fewest tokens that a drop leaves of such a sequence; `n_most` without a drop."""
        events = self.events(n_prompt, n_whole)
        return min((n_past - drop.n for n_past, drop in events), default=self.n_most)

    def _drops(self, n_past: int, n_new: int) -> tuple[Drop, ...]:
        """What goes of n_past tokens so that n_new may follow, or as much as can."""
        out: list[Drop] = []
        n_fit = self._n_fit(n_past)
        if n_fit < n_new:
            n_droppable = n_past - self.policy.n_keep
            n_new = max(n_new, n_at_once(n_droppable, requantizes=self.requantizes))
        while n_fit < n_new and (drop := self.policy.drop(n_past, n_new)) is not None:
            after = self._n_fit(n_past - drop.n)
            if after <= n_fit:
                break
            out.append(drop)
            n_past, n_fit = n_past - drop.n, after
        return tuple(out)

    def _n_fit(self, n_past: int) -> int:
        return self.policy.n_fit(self.n_ctx - n_past, n_past)

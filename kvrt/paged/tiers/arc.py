"""ARC, adaptive replacement: blocks used once and blocks used again, with an adaptive border.

Evicted keys are remembered for a while as ghosts. A use of a ghost of the first list says that this
list should have been longer, a use of a ghost of the second that it was too long.

Two things differ from vLLM's, which this follows otherwise. When the list to evict from has no idle
block, the other one is used: a store is refused only if there really is no room. A block that comes
back while its ghost is remembered has been used twice, as in the paper.

Source: ARC, Megiddo and Modha, FAST 2003, fig. 4.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvrt.paged.tiers.policy import Key, TierBlock, Victims

_Blocks = OrderedDict[Key, TierBlock]
_Ghosts = OrderedDict[Key, None]


class Arc:
    """Blocks in two lists, each in the order of their last use.

    Args:
      capacity: blocks that there are; each list of ghosts has at most as many keys.

    Attributes:
      once, again: blocks used once, and more often.
      gone_once, gone_again: ghosts of theirs.
      target: how many blocks `once` should have.
    """

    def __init__(self, capacity: int) -> None:
        """Starts empty, with a target of 0."""
        self._capacity = capacity
        self.once: _Blocks = OrderedDict()
        self.again: _Blocks = OrderedDict()
        self.gone_once: _Ghosts = OrderedDict()
        self.gone_again: _Ghosts = OrderedDict()
        self.target = 0.0

    def __len__(self) -> int:
        """Blocks that are there or coming."""
        return len(self.once) + len(self.again)

    def get(self, key: Key) -> TierBlock | None:
        """The block of a key."""
        return self.once.get(key) or self.again.get(key)

    def insert(self, key: Key, block: TierBlock) -> None:
        """Adds a block; among those used again if its ghost is remembered."""
        known = key in self.gone_once or key in self.gone_again
        (self.again if known else self.once)[key] = block
        self.gone_once.pop(key, None)
        self.gone_again.pop(key, None)

    def remove(self, key: Key) -> TierBlock:
        """Takes a block out and leaves no ghost."""
        return (self.once if key in self.once else self.again).pop(key)

    def touch(self, keys: Sequence[Key]) -> None:
        """Makes keys the most recent, the first of them the most recent; ghosts move the border.

        A block whose bytes are still coming was not used yet.
        """
        for key in reversed(keys):
            if key in self.once:
                if self.once[key].is_ready:
                    self.again[key] = self.once.pop(key)
                else:
                    self.once.move_to_end(key)
            elif key in self.again:
                self.again.move_to_end(key)
            elif key in self.gone_once:
                step = max(1.0, len(self.gone_again) / len(self.gone_once))
                self.target = min(self.target + step, float(self._capacity))
            elif key in self.gone_again:
                step = max(1.0, len(self.gone_once) / len(self.gone_again))
                self.target = max(self.target - step, 0.0)

    def evict(self, n: int, keep: Collection[Key]) -> Victims | None:
        """Evicts n idle blocks, from `once` while it is not below its target; all or none."""
        once, again = (
            ((k, h) for k, h in blocks.items() if h.is_idle and k not in keep)
            for blocks in (self.once, self.again)
        )
        victims, n_once = [], len(self.once)
        for _ in range(n):
            first, other = (once, again) if n_once >= int(self.target) else (again, once)
            victim = next(first, None) or next(other, None)
            if victim is None:
                return None
            n_once -= victim[0] in self.once
            victims.append(victim)
        for key, _ in victims:
            _move(key, self.once, self.gone_once, self._capacity)
            _move(key, self.again, self.gone_again, self._capacity)
        return victims


def _move(key: Key, blocks: _Blocks, ghosts: _Ghosts, capacity: int) -> None:
    """Makes a ghost of a block, if it is one of these."""
    if blocks.pop(key, None) is not None:
        ghosts[key] = None
        if len(ghosts) > capacity:
            ghosts.popitem(last=False)

"""A request that drops tokens, so that later ones move down, and what it needs for that.

Its positions change, so nobody else may have the blocks that move, and it can never be refused a
block in the middle: from its admission on it has as many as it will ever have at once. Blocks that
it has no use for now are spare; what slides out of a window, and what is dropped, goes there too.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moving:
    """What a request that drops tokens keeps.

    Attributes:
      n_most: tokens that it has at once at most.
      n_keep: its first tokens, which it never drops.
      n_left: tokens that each of its drops leaves, at least.
    """

    n_most: int
    n_keep: int
    n_left: int = 0

    def n_gap(self, block_size: int) -> int:
        """Cells of dropped tokens that lie between those that stay and those that moved, at most.

        They are in the last block that stays, and in the first one that moves.
        """
        return -self.n_keep % block_size + block_size - 1

"""Where the chunks of a prompt end, so that the states of recurrent layers can be kept.

A recurrent state is that of all tokens before it, and it can be found again only if a step ended
just there. Steps that end at block boundaries leave states that others can start from.

Source: vLLM's hybrid KV cache manager, Mamba mode "align"; Marconi, arXiv:2411.19379, for the
junction.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from kvrt.paged.layout.spec import PagedGroup
from kvrt.paged.rules import BlockRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkEnds:
    """Where chunks of a prompt should end.

    Attributes:
      block_size: tokens a block of the recurrent group.
      hash_size: tokens that a partial hit may end at a multiple of; None where there are no partial
        hits.
      n_chunk: tokens that a chunk can have at most.
      n_drop: blocks at the end of a hit that are computed again, 1 with EAGLE.
      interval: tokens at whose multiples a state is to be kept; 0 is nowhere.
    """

    block_size: int
    hash_size: int | None
    n_chunk: int
    n_drop: int = 0
    interval: int = 0

    def fit(
        self, start: int, n: int, *, n_prompt: int, n_tokens: int, kept: Iterable[int] = ()
    ) -> int:
        """How many of n tokens from `start` a step should compute, from 1 to n.

        Args:
          start: tokens that are there.
          n: tokens that the step has room for.
          n_prompt: tokens of the prompt.
          n_tokens: those of the prompt and the sampled ones.
          kept: further numbers of tokens after which a state is worth keeping, such as those of a
            prefix that others share.
        """
        if start >= max(n_prompt, n_tokens - 1):
            return n
        size = self.block_size
        end = start + n
        floor = end // size * size
        # What does not reach a boundary is computed as it is: a wait for more room could last.
        if end < n_tokens and size <= self.n_chunk and floor > start:
            end = floor
        stops = [max(n_tokens // size - self.n_drop, 0) * size]
        if start % size:
            stops.append(-(-start // size) * size)
        if self.hash_size is not None:
            stops.append(n_prompt // self.hash_size * self.hash_size)
        if self.interval:
            stops.append((start // self.interval + 1) * self.interval)
        stops += [x // size * size for x in kept]
        return min([end, *(s for s in stops if start < s < end)]) - start


def chunk_ends(
    groups: Sequence[PagedGroup], rules: BlockRules, interval: int | None, *, in_cells: bool
) -> ChunkEnds | None:
    """Where chunks should end; None for models without states, whose chunks may end anywhere.

    Args:
      groups: of the model.
      rules: of the block manager.
      interval: tokens between checkpoints; None and 0 are none.
      in_cells: whether hits end at any token.
    """
    if all(g.kind != "recurrent" for g in groups):
        return None
    if in_cells and interval is not None:
        n_chunk = rules.n_in_flight
        return ChunkEnds(block_size=1, hash_size=None, n_chunk=n_chunk, interval=interval)
    return ChunkEnds(
        block_size=math.lcm(*(g.block_size for g in groups)),
        hash_size=rules.hash_block_size if rules.partial else None,
        n_chunk=rules.n_in_flight,
        interval=interval or 0,
    )

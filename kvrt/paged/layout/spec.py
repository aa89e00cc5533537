"""The vocabulary of the paged mode: groups of layers with a block table, and pools of blocks.

Source: vLLM's hybrid KV cache manager; arXiv:2309.06180, sec. 4.
"""

import dataclasses
from typing import Literal

from kvrt.errors import BadConfig

GroupKind = Literal["full", "window", "chunked", "recurrent", "shared"]

# The block that stands for "nothing here" in every pool; it is never written nor read.
NULL = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedGroup:
    """Layers that share one block table a sequence.

    Attributes:
      kind: what a later token can see of the group's tokens; "shared" reads another group's blocks
        and has none of its own (issue 20: layers that share).
      layers: indices of the model's layers; the i-th one lies in buffer i of the pool.
      block_size: tokens a block.
      size: window or chunk in tokens; 0 for the other kinds.
      n_sink: first tokens that every later one sees beside its window or chunk.
      pool: index of the pool that its blocks come from; groups of one pool have one storage shape.
      target: the group whose table it reads, for "shared" alone.
      array_block: cells of a block of the device's arrays, a multiple of block_size; 0 is one block
        of the group. In arrays of larger blocks the null block has no cells.
      depth: of a recurrent group, newest states of a sequence that are kept; several only where
        each token has a block of its own.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    block_size: int
    size: int = 0
    pool: int = 0
    target: int | None = None
    n_sink: int = 0
    array_block: int = 0
    depth: int = 1

    @property
    def n_span(self) -> int:
        """Blocks of the group in a block of the arrays."""
        return max(self.array_block // self.block_size, 1)

    @property
    def first_cell(self) -> int:
        """The cell of the arrays that block 0 would begin with."""
        return 0 if self.n_span == 1 else -self.block_size

    def __post_init__(self) -> None:
        """Refuses windows without a size, and sharing without a target."""
        sized = self.kind in ("window", "chunked")
        for ok, message in (
            (self.block_size >= 1, f"block_size is {self.block_size}; it must be at least 1"),
            ((self.size > 0) == sized, f"a {self.kind} group with size {self.size}"),
            (
                self.depth == 1 or (self.kind == "recurrent" and self.block_size == 1),
                f"{self.depth} states a sequence of a {self.kind} group in blocks of "
                f"{self.block_size} tokens; several are kept of single tokens",
            ),
            (self.n_sink == 0 or sized, f"a {self.kind} group with {self.n_sink} sinks"),
            (
                (self.target is not None) == (self.kind == "shared"),
                "only shared groups have a target",
            ),
        ):
            if not ok:
                raise BadConfig(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Blocks of one storage shape.

    Attributes:
      n_blocks: blocks, the null block included.
      n_buffers: arrays that a block id points into: the most layers that a group of the pool has.
      block_bytes: bytes of a block in all buffers.
    """

    n_blocks: int
    n_buffers: int
    block_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedPlan:
    """Groups of all layers, and the pools that they take blocks from."""

    groups: tuple[PagedGroup, ...]
    pools: tuple[PoolSpec, ...]

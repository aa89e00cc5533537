"""Lines of memory that reads touch, counted: what sparse reads save, whatever a clock says."""

import numpy as np

from kvrt.arrays import Int32

LINE_BYTES = 64


def lines_read(
    cells: Int32[np.ndarray, " n"], block_size: int, head_dim: int, itemsize: int = 4
) -> int:
    """Distinct lines that hold keys and values of some cells of one kv head.

    Keys lie [D, B] in a block, so that one of 16 cells of float32 takes a line in each channel;
    values lie [B, D].

    Args:
      cells: which.
      block_size: cells of a block (B).
      head_dim: channels (D).
      itemsize: bytes of a number, of plain types.
    """
    cells = np.unique(cells).astype(np.int64)
    block, offset = np.divmod(cells, block_size)
    channels = np.arange(head_dim)
    size = block_size * head_dim
    at_k = block[:, None] * size + channels[None] * block_size + offset[:, None]
    at_v = block[:, None] * size + offset[:, None] * head_dim + channels[None]
    return sum(len(np.unique(at * itemsize // LINE_BYTES)) for at in (at_k, at_v))

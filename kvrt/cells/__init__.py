"""Positions and owners of cells: what a cache holds, without its bytes."""

from kvrt.cells.cells import Cells, create, n_ctx, n_free, n_kv, n_used, owned, owner_bits
from kvrt.cells.checks import Scalar, check_seq_id
from kvrt.cells.mask import visible
from kvrt.cells.seq import (
    clear,
    n_shared,
    plan_split,
    seq_add,
    seq_cp,
    seq_div,
    seq_keep,
    seq_pos_max,
    seq_pos_min,
    seq_rm,
)
from kvrt.cells.slots import (
    blocks_of,
    find_slots,
    first_freed,
    lowered_head,
    next_head,
    place,
    plan_slots,
    vacate,
)

__all__ = [
    "Cells",
    "Scalar",
    "blocks_of",
    "check_seq_id",
    "clear",
    "create",
    "find_slots",
    "first_freed",
    "lowered_head",
    "n_ctx",
    "n_free",
    "n_kv",
    "n_shared",
    "n_used",
    "next_head",
    "owned",
    "owner_bits",
    "place",
    "plan_slots",
    "plan_split",
    "seq_add",
    "seq_cp",
    "seq_div",
    "seq_keep",
    "seq_pos_max",
    "seq_pos_min",
    "seq_rm",
    "vacate",
    "visible",
]

"""Positions and owners of cells: what a cache holds, without its bytes.

Names are imported on first use, so that a reader of sessions does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrt.cells.cells import (
        Cells,
        create,
        lengthened,
        n_ctx,
        n_free,
        n_kv,
        n_used,
        owned,
        owner_bits,
    )
    from kvrt.cells.checks import Scalar, check_seq_id
    from kvrt.cells.edits import Copy, Divide, Keep, Remove, SeqEdit, Shift
    from kvrt.cells.mask import visible
    from kvrt.cells.sequences import (
        apply,
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

_HOMES = {
    "Cells": "cells",
    "Copy": "edits",
    "Divide": "edits",
    "Keep": "edits",
    "Remove": "edits",
    "Scalar": "checks",
    "SeqEdit": "edits",
    "Shift": "edits",
    "apply": "sequences",
    "blocks_of": "slots",
    "check_seq_id": "checks",
    "clear": "sequences",
    "create": "cells",
    "find_slots": "slots",
    "first_freed": "slots",
    "lengthened": "cells",
    "lowered_head": "slots",
    "n_ctx": "cells",
    "n_free": "cells",
    "n_kv": "cells",
    "n_shared": "sequences",
    "n_used": "cells",
    "next_head": "slots",
    "owned": "cells",
    "owner_bits": "cells",
    "place": "slots",
    "plan_slots": "slots",
    "plan_split": "sequences",
    "seq_add": "sequences",
    "seq_cp": "sequences",
    "seq_div": "sequences",
    "seq_keep": "sequences",
    "seq_pos_max": "sequences",
    "seq_pos_min": "sequences",
    "seq_rm": "sequences",
    "vacate": "slots",
    "visible": "mask",
}

__all__ = [
    "Cells",
    "Copy",
    "Divide",
    "Keep",
    "Remove",
    "Scalar",
    "SeqEdit",
    "Shift",
    "apply",
    "blocks_of",
    "check_seq_id",
    "clear",
    "create",
    "find_slots",
    "first_freed",
    "lengthened",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrt.cells' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvrt.cells.{_HOMES[name]}"), name)

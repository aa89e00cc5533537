"""Values that no sound model computes: NaN and infinities among stored keys, values and states.

Digests say that a file holds what was saved; this says whether that was worth saving.
"""

from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from kvrt.arrays import AnyArray
from kvrt.session import kv_arrays
from kvrt.session.snapshot import BLOCK_CELLS, GroupPart, Snapshot


def find_damage(snapshot: Snapshot) -> str | None:
    """The first array of a snapshot with NaN or infinity, for the middle of a line; None of none.

    It names layer, keys or values, how many of them are not finite, and the least position. Of
    quantized ones scales and minima are looked at. Logits may have -inf.
    """
    for i, group in enumerate(snapshot.groups):
        found = _in_group(snapshot.fingerprint["groups"][i]["layers"], group)
        if found:
            return found
    if snapshot.states is not None:
        layers = snapshot.fingerprint["recurrent"]["layers"]
        for layer, tables in zip(layers, snapshot.states.tables, strict=True):
            for j, x in enumerate(tables):
                if n := int(np.count_nonzero(_not_finite(x))):
                    return f"array {j} of the states of layer {layer} has {_values(n)}"
    for seq_id, (pos, x) in snapshot.logits.items():
        n = int(np.count_nonzero(_not_finite(x) & ~np.isneginf(x)))
        if n or not np.isfinite(x).any():
            what = _values(n) if n else "no finite value"
            return f"the logits of sequence {seq_id}, of position {pos}, have {what}"
    return None


def _in_group(layers: Sequence[int], group: GroupPart) -> str | None:
    # By layer and side: values that are not finite, and the least position of one.
    found: dict[tuple[int, str], tuple[int, int]] = {}
    for j, block in enumerate(group.blocks):
        pos = group.pos[j * BLOCK_CELLS : (j + 1) * BLOCK_CELLS]
        for side, x in _arrays(block.k, block.v):
            bad = _not_finite(x)[:, : len(pos)]
            # [layers, cells, heads, channels or groups of them]
            counts = np.count_nonzero(bad.reshape(*bad.shape[:2], -1), axis=2)
            for i in np.flatnonzero(counts.any(axis=1)).tolist():
                n, least = found.get((i, side), (0, 2**31))
                least = min(least, int(pos[counts[i] > 0].min()))
                found[i, side] = n + int(counts[i].sum()), least
    if not found:
        return None
    (i, side), (n, least) = min(found.items())
    more = f", and {len(found) - 1} more arrays are damaged" if len(found) > 1 else ""
    return f"the {side} of layer {layers[i]} have {_values(n)}, first at position {least}{more}"


def _arrays(k: kv_arrays.AnyKVArray, v: kv_arrays.AnyKVArray) -> Iterator[tuple[str, AnyArray]]:
    """Float arrays of keys and of values; the integers of quantized ones cannot be damaged so."""
    for side, x in (("keys", k), ("values", v)):
        for array in kv_arrays.tensors(side, x).values():
            if array.dtype == np.uint16 or not np.issubdtype(array.dtype, np.integer):
                yield side, array


def _not_finite(x: AnyArray) -> np.ndarray:
    held = np.asarray(x)
    # bf16 is kept as its bits in files.
    return ~np.isfinite(held.view(ml_dtypes.bfloat16) if held.dtype == np.uint16 else held)


def _values(n: int) -> str:
    return f"{n:,} value{'' if n == 1 else 's'} of NaN or infinity"

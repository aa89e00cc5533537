"""A map of cells: a sign for each, by its owners."""

import numpy as np

from kvrt.arrays import UInt32

MAP_WIDTH = 64
OWNERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def signs(seqs: UInt32[np.ndarray, "C W"], width: int = MAP_WIDTH) -> list[str]:
    """A sign for each cell, in rows of `width`: its owner, M if shared, `.` if empty.

    Owners beyond 35 share the sign +.
    """
    bits = np.unpackbits(seqs.astype("<u4").view(np.uint8), axis=1, bitorder="little")
    all_signs = np.array([*OWNERS, "+"])
    owner = all_signs[np.minimum(bits.argmax(axis=1), len(OWNERS))]
    n_owners = bits.sum(axis=1, dtype=np.int64)
    text = "".join(np.where(n_owners > 1, "M", np.where(n_owners == 1, owner, ".")).tolist())
    return [text[i : i + width] for i in range(0, len(text), width)]

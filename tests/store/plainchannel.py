"""Keys in codes by channel, worked out in NumPy: groups in a dictionary, a tail in a list."""

import numpy as np
import plaincodec

SIZE = 32


def encoded(x, bits):
    """Codes, scales and minima of a group [32, H, D]: as of rows whose channels are its cells."""
    return plaincodec.encoded(np.moveaxis(x, 0, -1), f"int{bits}")


def decoded(found, bits):
    """A group, float32."""
    return np.moveaxis(plaincodec.decoded(*found, f"int{bits}"), -1, 0)


class Keys:
    """Keys of a layer: [cells, H, D]."""

    def __init__(self, n_cells, n_heads, head_dim, n_places, bits):
        self.bits, self.n_places, self.n_cells = bits, n_places, n_cells
        empty = np.zeros((SIZE, n_heads, head_dim), np.float16)
        self.coded = {g: encoded(empty, bits) for g in range(n_cells // SIZE)}
        self.tail = {}  # groups as they are, the one that was not written for longest first

    def put(self, slots, new):
        for group in sorted({s // SIZE for s in slots if s < self.n_cells}):
            keys = self.tail.pop(group, None)
            if keys is None:
                if len(self.tail) == self.n_places:
                    oldest = next(iter(self.tail))
                    self.coded[oldest] = encoded(self.tail.pop(oldest), self.bits)
                keys = decoded(self.coded[group], self.bits).astype(np.float16)
            self.tail[group] = keys
            for slot, row in zip(slots, new, strict=True):
                if slot // SIZE == group:
                    keys[slot % SIZE] = row.astype(np.float16)

    def group(self, group):
        if group in self.tail:
            return self.tail[group].astype(np.float32)
        return decoded(self.coded[group], self.bits)

    def all(self):
        """All keys as attention reads them, [cells, H, D] float32."""
        return np.concatenate([self.group(g) for g in range(self.n_cells // SIZE)])

    def replace(self, new, moved):
        """Keys of moved cells become others where they lie."""
        for g in range(self.n_cells // SIZE):
            at = slice(g * SIZE, (g + 1) * SIZE)
            if not moved[at].any():
                continue
            keys = np.where(moved[at][:, None, None], new[at], self.group(g))
            if g in self.tail:
                self.tail[g] = keys.astype(np.float16)
            else:
                self.coded[g] = encoded(keys, self.bits)


class RunKeys:
    """Keys of a layer in an engine's blocks: a run of cells is quantized with its last cell."""

    def __init__(self, n_cells, n_heads, head_dim, run, bits):
        self.bits, self.run = bits, run
        self.keys = np.zeros((n_cells, n_heads, head_dim), np.float32)

    def put(self, slots, new):
        """Slots of a run are written in order."""
        for slot, row in zip(slots, new, strict=True):
            self.keys[slot] = row.astype(np.float16)
        for slot in slots:
            if slot % self.run == self.run - 1:
                for first in range(slot + 1 - self.run, slot + 1, SIZE):
                    at = slice(first, first + SIZE)
                    found = encoded(self.keys[at].astype(np.float16), self.bits)
                    self.keys[at] = decoded(found, self.bits)

"""Cells as Python lists, one cell at a time, and their notation; what the array code must equal.

A map is written as in `0 . 3-2{0,1}`: position, pending shift, owners ({0} may be left out), and a
dot for an empty cell.
"""

import re

import numpy as np

from kvrt.cells import Cells

CELL = re.compile(r"(\d+)([+-]\d+)?(?:\{([\d,]+)\})?")


class PlainCells:
    """pos and delta as lists, owners as a list of sets."""

    def __init__(self, n_ctx):
        self.pos, self.delta = [-1] * n_ctx, [0] * n_ctx
        self.seqs = [set() for _ in range(n_ctx)]

    def free(self, c):
        self.pos[c], self.delta[c], self.seqs[c] = -1, 0, set()

    def hit(self, seq, p0, p1):
        return [
            c
            for c, pos in enumerate(self.pos)
            if pos >= p0 and (p1 is None or pos < p1) and (seq is None or seq in self.seqs[c])
        ]

    def rm(self, seq, p0, p1):
        for c in self.hit(seq, p0, p1):
            self.seqs[c].discard(seq)
            if seq is None or not self.seqs[c]:
                self.free(c)

    def cp(self, src, dst, p0, p1):
        for c in self.hit(src, p0, p1):
            self.seqs[c].add(dst)

    def keep(self, seq):
        for c in range(len(self.pos)):
            if seq in self.seqs[c]:
                self.seqs[c] = {seq}
            else:
                self.free(c)

    def n_shared(self, seq, p0, p1):
        return sum(len(self.seqs[c]) > 1 for c in self.hit(seq, p0, p1))

    def add(self, seq, p0, p1, d):
        self._move(seq, p0, p1, lambda pos: pos + d)

    def div(self, seq, p0, p1, d):
        self._move(seq, p0, p1, lambda pos: pos // d)

    def _move(self, seq, p0, p1, new_pos):
        for c in self.hit(seq, p0, p1):
            if len(self.seqs[c]) > 1:
                continue
            new = new_pos(self.pos[c])
            self.delta[c] += new - self.pos[c]
            self.pos[c] = new
            if new < 0:
                self.free(c)

    def find(self, head, n):
        """llama.cpp's find_slot, one cell at a time; None if there is no room."""
        size = len(self.pos)
        if head > sum(pos >= 0 for pos in self.pos) + 2 * n:
            head = 0
        if n > size:
            return None
        found = []
        for tested in range(len(self.pos)):
            c = (head + tested) % len(self.pos)
            if len(found) < n and self.pos[c] < 0:
                found.append(c)
        return found if len(found) == n else None

    def place(self, slots, pos, seq):
        for c, p in zip(slots, pos, strict=True):
            self.pos[c], self.delta[c], self.seqs[c] = p, 0, {seq}


def render(cells):
    """Cells, of arrays or of lists, as a map."""
    if isinstance(cells, Cells):
        cells = plain(cells)
    return " ".join(_cell(*x) for x in zip(cells.pos, cells.delta, cells.seqs, strict=True))


def _cell(pos, delta, seqs):
    if pos < 0:
        assert not seqs and delta == 0, "an empty cell has no owner and nothing pending"
        return "."
    owners = "" if seqs == {0} else "{" + ",".join(map(str, sorted(seqs))) + "}"
    return f"{pos}{f'{delta:+d}' if delta else ''}{owners}"


def plain(cells):
    """Array cells as lists."""
    out = PlainCells(len(cells.pos))
    out.pos, out.delta = np.asarray(cells.pos).tolist(), np.asarray(cells.delta).tolist()
    bits = np.unpackbits(np.asarray(cells.seqs).view(np.uint8), axis=1, bitorder="little")
    out.seqs = [set(np.flatnonzero(row).tolist()) for row in bits]
    return out


def parse(text, n_seq_max=32):
    """The NumPy cells of a map."""
    words = text.split()
    pos, delta = np.full(len(words), -1, np.int32), np.zeros(len(words), np.int32)
    seqs = np.zeros((len(words), -(-n_seq_max // 32)), np.uint32)
    for c, word in enumerate(words):
        if word == ".":
            continue
        p, d, owners = CELL.fullmatch(word).groups()
        pos[c], delta[c] = int(p), int(d or 0)
        for s in (owners or "0").split(","):
            seqs[c, int(s) // 32] |= np.uint32(1 << int(s) % 32)
    return Cells(pos=pos, delta=delta, seqs=seqs)

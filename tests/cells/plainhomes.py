"""The rule of home blocks, cell by cell, with lists and dictionaries."""


class Homes:
    """Who owns each cell, and the cell behind the newest token of each sequence."""

    def __init__(self, n_cells, size):
        self.cells, self.size, self.ends = [set() for _ in range(n_cells)], size, {}

    def block(self, b):
        return [c for c in range(b * self.size, (b + 1) * self.size) if c < len(self.cells)]

    def n_empty(self, b):
        return sum(not self.cells[c] for c in self.block(b))

    def home(self, seq):
        return (self.ends[seq] - 1) // self.size if seq in self.ends else None

    def blocks_of(self, seq):
        return sorted({c // self.size for c, who in enumerate(self.cells) if seq in who})

    def place(self, tokens):
        """Cells of some tokens, given as how many each sequence has: [(seq, n), ...]."""
        found, claimed, left = {}, set(), []
        for seq, n in tokens:
            behind = range(self.ends.get(seq, 0), self.ends.get(seq, 0) + n)
            inside = seq in self.ends and set(behind) <= set(self.block(self.home(seq)))
            if inside and not any(self.cells[c] for c in behind):
                if not claimed & set(behind):
                    found[seq] = list(behind)
                claimed |= set(behind)
            if seq not in found:
                left.append((seq, n))
        for seq, cells in found.items():
            self.put(seq, cells)
        for seq, n in left:
            found[seq] = []
            for _ in range(n):
                found[seq].append(self.next_cell(seq))
                self.put(seq, found[seq][-1:])
        return [c for seq, _ in tokens for c in found[seq]]

    def put(self, seq, cells):
        for c in cells:
            assert not self.cells[c]
            self.cells[c].add(seq)
            self.ends[seq] = c + 1

    def next_cell(self, seq):
        home = self.home(seq)
        if home is not None and self.n_empty(home):
            return self.first_empty(home, self.ends[seq])
        blocks = range(-(-len(self.cells) // self.size))
        living = {b: sum(self.home(s) == b for s in self.ends) for b in blocks}
        mine = [b for b in self.blocks_of(seq) if not living[b] and self.n_empty(b)]
        if mine:
            return self.first_empty(max(mine, key=self.n_empty), 0)
        b = max(blocks, key=lambda b: self.n_empty(b) / (living[b] + 1))
        empty = [c for c in self.block(b) if not self.cells[c]]
        return empty[len(empty) // 2] if living[b] else empty[0]

    def first_empty(self, b, start):
        empty = [c for c in self.block(b) if not self.cells[c]]
        return next((c for c in empty if c >= start), empty[0])

    def end(self, seq):
        """A sequence ends; its cells are empty."""
        self.ends.pop(seq, None)
        for who in self.cells:
            who.discard(seq)

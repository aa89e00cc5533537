"""Random histories with sequences that are laid in blocks and taken out again."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
from hypothesis import event
from hypothesis.stateful import invariant, rule
from machine import N_CTX, N_SEQ, SEQS, CacheMachine, snapshot

from kvrt import cells as kc
from kvrt import errors


class BlockMachine(CacheMachine):
    """With sequences that lie in blocks for a while, which may be refused what others are not."""

    refusals = (errors.CannotRewind, errors.CacheFull, errors.UsageError)
    reasons = (
        *CacheMachine.reasons,
        "in blocks",
        "a block has one place",
        f"of {N_CTX} are empty",
        f"of {N_CTX} are free",
    )

    @property
    def laid(self):
        """Sequences in blocks, and their tables."""
        found = {s: [t for t in self.runtime.table(s) if t is not None] for s in range(N_SEQ)}
        return {s: tables[0] for s, tables in found.items() if tables}

    @property
    def may_refuse(self):
        return self.rolls or bool(self.laid)

    @property
    def n_free(self):
        """Empty cells but for those beside the tokens of sequences in blocks."""
        mine = {b for table in self.laid.values() for b in table if b >= 0}
        pos = self.runtime.cells.pos
        kept = sum(int(np.count_nonzero(pos[8 * b : 8 * b + 8] < 0)) for b in mine)
        return super().n_free - kept

    def room(self, *seqs):
        return N_CTX if set(seqs) & set(self.laid) else self.n_free

    @invariant()
    def counts_alike(self):
        self.part()
        super().counts_alike()
        for seq, table in self.laid.items():
            mine = np.flatnonzero(kc.owned(self.runtime.cells, seq))
            pos = self.runtime.cells.pos[mine]
            assert (np.array(table, np.int32)[pos // 8] * 8 + pos % 8 == mine).all()

    def part(self):
        """Tells the oracle which rows a sequence in blocks has a copy of by now."""
        cells = self.runtime.cells
        for seq in self.laid:
            for i, row in enumerate(self.oracle.rows.get(seq, [])):
                cell = kc.owned(cells, seq) & (cells.pos == row.pos)
                if int(cells.seqs[cell, 0][0]) == 1 << seq:
                    self.oracle.rows[seq][i] = dataclasses.replace(row)

    @rule(seq=SEQS)
    def to_blocks(self, seq):
        before = snapshot(self.runtime)
        try:
            n = self.runtime.to_blocks(seq)
        except (errors.CacheFull, errors.UsageError) as error:
            event(f"to_blocks {type(error).__name__}")
            assert snapshot(self.runtime) == before
            return
        event("to_blocks with copies" if n else "to_blocks")
        assert seq in self.laid

    @rule(seq=SEQS)
    def to_cells(self, seq):
        before = snapshot(self.runtime)
        self.runtime.to_cells(seq)
        assert snapshot(self.runtime) == before and seq not in self.laid

    @rule(by_sequence=st.booleans())
    def defrag(self, by_sequence):
        if self.laid:
            self.refused(errors.UsageError, lambda: self.runtime.defrag(by_sequence=by_sequence))
            return
        self.runtime.defrag(by_sequence=by_sequence)

"""Random histories of a `Runtime` against the oracle: hypothesis's state machine.

A run reuses one runtime per setting and clears it first, so that programs compile once.
"""

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvrt import CacheConfig, Runtime, errors, session
from kvrt import cells as kc
from tests.oracle import Oracle, Row, rope
from tests.toys import RowModel, allclose, tables

N_CTX, N_SEQ, N_VOCAB = 21, 3, 32
# Keys are turned by float32 angles and, with rope="write", several times over.
TOLERANCE = 1e-4

SEQS = st.integers(0, N_SEQ - 1)
TOKENS = st.integers(0, N_VOCAB - 1)
RANGES = st.one_of(
    st.tuples(st.integers(0, 9), st.none()),
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda x: (x[0], x[0] + x[1])),
)
REFUSED = (
    (errors.BadRange, lambda r, s: r.seq_rm(s, 5, 4)),
    (errors.BadRange, lambda r, s: r.seq_cp(s, 0, -1, 4)),
    (errors.BadRange, lambda r, s: r.seq_add(s, 9, 3, 1)),
    (errors.BadRange, lambda r, s: r.seq_add(s, 0, None, 2**31)),
    (errors.BadRange, lambda r, s: r.seq_div(s, 0, None, 0)),
    (errors.BadSequence, lambda r, s: r.seq_rm(N_SEQ)),
    (errors.BadSequence, lambda r, s: r.seq_cp(s, N_SEQ)),
    (errors.BadSequence, lambda r, s: r.seq_keep(-1)),
    (errors.BadSequence, lambda r, s: r.append([1], N_SEQ)),
    (errors.BadToken, lambda r, s: r.append([1, N_VOCAB], s)),
    (errors.BadToken, lambda r, s: r.decode({s: -1})),
    (errors.BadToken, lambda r, s: r.probe([], s)),
)


@functools.cache
def model(masks=()):
    return RowModel(n_vocab=N_VOCAB, masks=masks)


@functools.cache
def runtime(mode, masks=(), block_size=8):
    """21 cells in 3 blocks of 8, the last one part-filled, so that the ring wraps early.

    The device's arrays have 24 cells; 22 with blocks of one cell, for 21 is no size of theirs.
    With a window of 3 and steps of 4 tokens its group has 16 cells, of 3 sequences.
    """
    n_ubatch = 4 if masks else 8
    sizes = {"n_ctx": N_CTX, "n_seq_max": N_SEQ, "block_size": block_size, "n_ubatch": n_ubatch}
    return Runtime(model(masks), CacheConfig(**sizes, rope=mode))


def snapshot(r):
    """All that the host knows, without making the device catch up."""
    arrays = [x.tobytes() for c in r.group_cells for x in (c.pos, c.delta, c.seqs)]
    return arrays, r.stats(), [r.resume_positions(s) for s in range(N_SEQ)]


class CacheMachine(RuleBasedStateMachine):
    """One runtime and one oracle, told the same things."""

    refusals = (errors.CannotRewind, errors.CacheFull)
    reasons = ("windowed layers", "layers with a")

    def __init__(self, mode, masks=(), block_size=8):
        super().__init__()
        self.runtime, self.oracle = runtime(mode, masks, block_size), Oracle()
        self.runtime.clear()
        self.model = model(masks)
        self.tables = tables(self.model)
        self.rolls = bool(masks)
        self.n_steps = 0
        self.folder = Path(tempfile.mkdtemp())

    # --- what is compared ------------------------------------------------------------------

    @property
    def n_free(self):
        return N_CTX - self.oracle.n_used()

    @property
    def may_refuse(self):
        """Whether a change may be refused for what the oracle knows nothing of."""
        return self.rolls

    def room(self, *seqs):
        """Tokens of these sequences that must fit or be refused."""
        return self.n_free

    def attended(self, seq, tokens, first=None):
        """What tokens at the end of a sequence see, by the oracle, which stays as it is."""
        q, k, v = self.tables
        first = self.oracle.pos_max(seq) + 1 if first is None else first
        after = Oracle()
        after.rows[seq] = self.oracle.of(seq) + [
            Row(first + i, k[t], v[t]) for i, t in enumerate(tokens)
        ]
        pos = range(first, first + len(tokens))
        group = self.model.group

        def turn(x, pos):
            return rope(x, pos, n_rot=group.rope.n_rot, base=group.rope.base)

        def seen(mask):
            return after.attend(seq, q[list(tokens)], pos, mask, group.head_dim**-0.5, turn)

        out = sum(seen(g.mask) for g in self.model.groups)
        return out.reshape(len(tokens), -1)

    def told(self, seq, tokens):
        """The oracle's part of an append."""
        _, k, v = self.tables
        first = self.oracle.pos_max(seq) + 1
        pos = range(first, first + len(tokens))
        self.oracle.append(seq, pos, [(k[t], v[t]) for t in tokens])

    def refused(self, error, call):
        """A call that must fail, and leave no trace."""
        before = snapshot(self.runtime)
        with pytest.raises(error) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert snapshot(self.runtime) == before

    def changed(self, call):
        """Whether a change was made; with rows that are used again it may be refused as a whole."""
        if not self.may_refuse:
            call()
            return True
        before = snapshot(self.runtime)
        try:
            call()
        except self.refusals as error:
            event(type(error).__name__)
            assert any(x in str(error) for x in self.reasons)
            assert snapshot(self.runtime) == before
            return False
        return True

    @invariant()
    def counts_alike(self):
        assert self.runtime.n_free == self.n_free
        for seq in range(N_SEQ):
            mine = kc.owned(self.runtime.cells, seq)
            assert sorted(self.runtime.cells.pos[mine].tolist()) == self.oracle.positions(seq)
            self.tokens_alike(seq)
            assert self.runtime.seq_pos_min(seq) == self.oracle.pos_min(seq)
            assert self.runtime.seq_pos_max(seq) == self.oracle.pos_max(seq)

    def tokens_alike(self, seq):
        """The runtime's note of the tokens, against the rows that only they can have made."""
        rows = self.oracle.of(seq)
        pos, ids = self.runtime.token_history(seq)
        assert pos.tolist() == [row.pos for row in rows]
        by_value = {self.tables[2][t].tobytes(): t for t in range(N_VOCAB)}
        # Of tokens at one position the order is the runtime's own.
        expected = sorted((row.pos, by_value[row.v.tobytes()]) for row in rows)
        assert sorted(zip(pos.tolist(), ids.tolist(), strict=True)) == expected

    @invariant()
    def attends_alike(self):
        # Attention flushes; only every third step, so that position changes add up in between.
        self.n_steps += 1
        if self.n_steps % 3 == 0:
            self.look()

    def look(self):
        for seq in range(N_SEQ):
            tokens = [(self.n_steps + seq) % N_VOCAB, 7]
            allclose(self.runtime.probe(tokens, seq), self.attended(seq, tokens), TOLERANCE)
        device = np.asarray(self.runtime.cache.cells[0].pos)
        assert len(device) > N_CTX
        assert (device[N_CTX:] == -1).all()

    def teardown(self):
        self.look()
        shutil.rmtree(self.folder)

    @initialize(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=N_SEQ), fork=st.booleans())
    def begin(self, lengths, fork):
        """Histories of an empty cache are short on events."""
        for seq, n in enumerate(lengths):
            self.append(seq, [(5 * seq + 3 * i) % N_VOCAB for i in range(n)])
        if fork:
            self.cp(0, N_SEQ - 1, (1, None))

    # --- tokens ----------------------------------------------------------------------------

    @rule(seq=SEQS, tokens=st.lists(TOKENS, min_size=1, max_size=10))
    def append(self, seq, tokens):
        if len(tokens) > self.room(seq):
            return self.refused(errors.CacheFull, lambda: self.runtime.append(tokens, seq))
        expected, out = self.attended(seq, tokens), []
        if self.changed(lambda: out.append(self.runtime.append(tokens, seq))):
            allclose(out[0], expected[-1:], TOLERANCE)
            self.told(seq, tokens)
        return None

    @rule(tokens=st.dictionaries(SEQS, TOKENS, min_size=1))
    def decode(self, tokens):
        if len(tokens) > self.room(*tokens):
            return self.refused(errors.CacheFull, lambda: self.runtime.decode(tokens))
        expected, outs = {s: self.attended(s, [t])[0] for s, t in tokens.items()}, {}
        if self.changed(lambda: outs.update(self.runtime.decode(tokens))):
            for s, out in outs.items():
                allclose(out, expected[s], TOLERANCE)
                self.told(s, [tokens[s]])
        return None

    @rule(seq=SEQS)
    def last_logits(self, seq):
        """Logits of the newest token held, whatever was done to its sequence, and no trace."""
        rows = self.oracle.of(seq)
        if not rows or (len(rows) > 1 and rows[-2].pos == rows[-1].pos):
            return self.refused(errors.BadToken, lambda: self.runtime.last_logits(seq))
        (token,) = self.runtime.token_history(seq)[1][-1:].tolist()
        self.oracle.rows[seq] = rows[:-1]
        expected = self.attended(seq, [token], rows[-1].pos)
        self.oracle.rows[seq] = rows
        self.runtime.flush()
        before, out = snapshot(self.runtime)[0], []
        if self.changed(lambda: out.append(self.runtime.last_logits(seq))):
            allclose(out[0], expected, TOLERANCE)
        assert snapshot(self.runtime)[0] == before
        return None

    # --- sequences -------------------------------------------------------------------------

    @rule(seq=st.one_of(SEQS, st.none()), within=RANGES)
    def rm(self, seq, within):
        can = seq is None or self.runtime.can_remove(seq, *within)
        if self.changed(lambda: self.runtime.seq_rm(seq, *within)):
            self.oracle.rm(seq, *within)
            assert can
        else:
            assert seq is None or not can

    @rule(src=SEQS, dst=SEQS, within=RANGES)
    def cp(self, src, dst, within):
        if self.changed(lambda: self.runtime.seq_cp(src, dst, *within)):
            self.oracle.cp(src, dst, *within)

    @rule(src=SEQS, dst=SEQS)
    def fork(self, src, dst):
        self.cp(src, dst, (0, None))

    @rule(seq=SEQS)
    def keep(self, seq):
        self.runtime.seq_keep(seq)
        self.oracle.keep(seq)

    @rule(seq=SEQS, within=RANGES, d=st.integers(-9, 9))
    def add(self, seq, within, d):
        if d != 0 and self.oracle.n_shared(seq, *within) > self.room(seq):
            return self.refused(errors.CacheFull, lambda: self.runtime.seq_add(seq, *within, d))
        if self.changed(lambda: self.runtime.seq_add(seq, *within, d)):
            self.oracle.add(seq, *within, d)
        return None

    @rule(seq=SEQS, within=RANGES, d=st.integers(1, 4))
    def div(self, seq, within, d):
        if d != 1 and self.oracle.n_shared(seq, *within) > self.room(seq):
            return self.refused(errors.CacheFull, lambda: self.runtime.seq_div(seq, *within, d))
        if self.changed(lambda: self.runtime.seq_div(seq, *within, d)):
            self.oracle.div(seq, *within, d)
        return None

    @precondition(lambda self: self.oracle.n_used() > N_CTX // 2)
    @rule()
    def clear(self):
        self.runtime.clear()
        self.oracle.clear()

    @rule(seq=SEQS, case=st.sampled_from(REFUSED))
    def refuse(self, seq, case):
        error, call = case
        if self.oracle.n_shared(seq) > self.n_free:
            error = (error, errors.CacheFull)  # whichever is seen first
        self.refused(error, lambda: call(self.runtime, seq))

    # --- sessions --------------------------------------------------------------------------

    @rule(data=st.data())
    def save_and_load(self, data):
        """All of it, or one sequence under another name; rows come back to the bit."""
        path = self.folder / "x.kv"
        session.save(path, self.runtime.snapshot())
        taken = session.read(path)
        if data.draw(st.booleans(), "all"):
            self.runtime.clear()
            self.runtime.append([1, 2, 3], 1)
            self.runtime.restore(taken)
            return
        src, dst = data.draw(st.tuples(SEQS, SEQS), "sequences")
        if src not in {*taken.seq_ids, *taken.in_blocks}:
            before = snapshot(self.runtime)
            with pytest.raises(errors.BadSequence):
                self.runtime.restore(taken, {src: dst})
            assert snapshot(self.runtime) == before
            return
        after = Oracle()
        after.rows = {s: list(rows) for s, rows in self.oracle.rows.items() if s != dst}
        after.rows[dst] = [dataclasses.replace(r) for r in self.oracle.of(src)]
        if after.n_used() > N_CTX:
            self.refused(errors.CacheFull, lambda: self.runtime.restore(taken, {src: dst}))
        elif self.changed(lambda: self.runtime.restore(taken, {src: dst})):
            self.oracle.rows = after.rows

    # --- upkeep ----------------------------------------------------------------------------

    @rule()
    def kshift(self):
        self.runtime.flush()
        assert not any(cells.delta.any() for cells in self.runtime.group_cells)

    @rule(by_sequence=st.booleans())
    def defrag(self, by_sequence):
        self.runtime.defrag(by_sequence=by_sequence)
        for cells in self.runtime.group_cells:
            assert kc.n_kv(cells) == kc.n_used(cells)
        if by_sequence:
            n = self.oracle.n_used()
            # With 3 sequences, the lowest owner is the lowest bit.
            bits = self.runtime.cells.seqs[:n, 0].astype(np.int64)
            order = list(zip((bits & -bits).tolist(), self.runtime.cells.pos[:n], strict=True))
            assert order == sorted(order)

"""What holds of the cache of an engine after any step."""

from collections import Counter

import numpy as np

from kvrt.cells import owned


def assert_sound(engine):
    """No block is lost, each is of one group, and tables, cells and counts say the same."""
    assert_held(engine)
    for pool in engine.space.pools:
        if pool._span > 1:
            empty = [b for b in range(1, pool.n_blocks) if not (pool.n_refs(b) or pool.keys(b))]
            counts = np.bincount([(b - 1) // pool._span for b in empty], minlength=1)
            assert np.array_equal(np.trim_zeros(pool._n_empty, "b"), np.trim_zeros(counts, "b"))
    arrays, manager = engine.space._arrays, engine.space.manager
    for g, of_pool in arrays._attended:
        cells, group, mine = of_pool.cells, engine.space.groups[g], set()
        assert np.array_equal(cells.pos >= 0, cells.seqs.any(axis=1))
        for state in engine.running:
            table, seq = manager.table(state.seq_id, g), arrays._tables[g]
            blocks = np.array([b for b in table if b], np.int32)
            cells_of_table = of_pool.which(blocks)
            here = owned(cells, state.seq_id)
            here[cells_of_table] = False
            # Other groups of the pool have cells of the sequence as well.
            mine |= set(np.flatnonzero(here).tolist())
            if state.schedule is None:
                there = [i for i in range(state.n_computed) if table[i // group.block_size]]
                slots = seq.slots(
                    np.full(len(there), state.seq_id, np.int32), np.array(there, np.int32)
                )
                assert np.array_equal(cells.pos[slots], there)
                assert owned(cells, state.seq_id)[slots].all()
            if group.n_span > 1:
                n = np.array([state.n_computed - state.n_dropped], np.int32)
                (ids,), (n_listed,) = seq.read(np.array([state.seq_id], np.int32), n, 1)
                listed, mine_there = ids[:n_listed].tolist(), cells_of_table // seq.array_block
                assert len(set(listed)) == len(listed) and set(listed) <= set(mine_there.tolist())
                if group.kind == "full":
                    assert set(listed) == set(mine_there.tolist())
                elif state.schedule is None:
                    seen = [i for i in there if i >= seq._floor(n)[0] or i < group.n_sink]
                    slots = slots[np.isin(there, seen)]
                    assert set(listed) >= set((slots // seq.array_block).tolist())
        if sum(x is of_pool for _, x in arrays._attended) == 1:
            assert not mine, "cells of a sequence that are in no block of its table"


def assert_held(engine):
    """Blocks have the references that tables, pins and copies have to them."""
    space = engine.space
    held = [Counter() for _ in space.pools]
    group_of = [{} for _ in space.pools]
    for g, group in enumerate(space.groups):
        for state in engine.running:
            ids = [b for b in space.manager.table(state.seq_id, g) if b]
            held[group.pool].update(ids)
            for b in ids:
                assert group_of[group.pool].setdefault(b, g) == g
            # Room that a request with a policy has from its admission on.
            spare = space.manager._requests[state.seq_id].spare
            held[group.pool].update(spare[g] if spare else ())
    for i, (pool, mine) in enumerate(zip(space.pools, held, strict=True)):
        for hit in space.manager.promises._hits.values():
            of_pool = [x for g, x in zip(space.groups, hit.blocks, strict=True) if g.pool == i]
            mine.update(b for blocks in of_pool for b in blocks if b)
        # Both ends of a copy are held until the step after it.
        mine.update(space.manager._copies.held(i))
        refs = {b: pool.n_refs(b) for b in range(1, pool.n_blocks) if pool.n_refs(b)}
        assert refs == mine
        assert pool.n_free + len(refs) == pool.n_blocks - 1
        assert pool.n_cached <= pool.n_free
    assert min(space.manager.promises.n_spare()) >= 0

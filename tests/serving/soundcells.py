"""What holds of the prefixes of an engine in cells after any step."""

import numpy as np

from kvrt.cells import blocks_of, n_used, owned
from kvrt.serving.cache.prefixes import N_KEPT


def tokens_of(tree, name):
    """Tokens of a sequence of a tree, as its edges have them."""
    node, edges = tree._nodes[name], []
    while node is not None:
        edges.append(node.edge)
        node = node.parent
    return np.concatenate(edges[::-1])


def assert_indexed(group, running):
    """What a group knows of its cells without looking is what they say."""
    cells, size = group.cells, group.extent.block_size
    assert np.array_equal(cells.pos >= 0, cells.seqs.any(axis=1))
    assert group.n_used == n_used(cells)
    ids = np.array(running, np.int32)
    ends = np.array([group.pos_max(s) + 1 for s in running], np.int32)
    found = group.seq_blocks(ids, ends, len(ids) + 1)
    assert found.n_blocks[-1] == 0
    for s, end, table, n in zip(running, ends, found.tables, found.n_blocks, strict=False):
        pos = cells.pos[owned(cells, s)]
        assert end == pos.max(initial=-1) + 1 or group.group.lost.get(s)
        wanted = blocks_of(cells, [s], size).tolist()
        assert set(table[:n].tolist()) <= set(wanted)
        assert group._scans or table[:n].tolist() == wanted


def assert_sound(engine):
    """The tree has what cells have, numbers are used once, and nothing that is kept was moved."""
    space = engine.space
    host, prefixes = space._host, space._prefixes
    tree, n_seq = prefixes._tree, space.n_seq_max
    kept = {name for name in tree if name >= host.first_kept}
    running = {state.seq_id: state for state in engine.running}
    pinned = prefixes.pinned.seq_ids
    assert pinned <= kept and tree._locked == (set(tree) - kept) | pinned
    assert set(tree) - kept <= set(running)
    assert kept | set(prefixes._free) == set(range(host.first_kept, host.first_kept + N_KEPT))
    assert len(kept) == prefixes.n_kept and not kept & set(prefixes._free)
    if prefixes.by_sequence:
        assert prefixes._bare <= kept
        assert len(kept - prefixes._bare) + len(running) <= n_seq
        assert all(host.checkpoints.of(name) for name in prefixes._bare)
    for name in tree:
        n, known = tree.n_tokens(name), tokens_of(tree, name).tolist()
        assert len(known) == n and (n or name not in kept)
        assert name in kept or known == running[name].tokens[:n]
        for group in host.complete:
            pos = group.cells.pos[owned(group.cells, name)]
            assert sorted(pos[pos < n].tolist()) == list(range(n))
            assert name not in kept or len(pos) == n
    for group in host.groups:
        cells = group.cells
        found = np.any([owned(cells, name) for name in kept] or [cells.pos < -1], axis=0)
        assert not cells.delta[found].any()
        # Used cells are of somebody who runs, of a pin, or kept, and then they are idle.
        held = [owned(cells, name) for name in (*range(n_seq), *pinned)]
        idle = (cells.pos >= 0) & ~np.any(held, axis=0)
        assert np.array_equal(idle, found & idle) and np.array_equal(idle, prefixes._idle(group))
    for group in host.groups:
        assert_indexed(group, sorted(running))
    for group in host.complete[:1]:
        assert prefixes.n_idle == np.count_nonzero(prefixes._idle(group))

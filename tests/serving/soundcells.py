"""What holds of the prefixes of an engine in cells after any step."""

import numpy as np

from kvrt.cellcache import history
from kvrt.cells import owned
from kvrt.serving.cache.prefixes import N_KEPT


def tokens_of(tree, name):
    """Tokens of a sequence of a tree, as its edges have them."""
    node, edges = tree._nodes[name], []
    while node is not None:
        edges.append(node.edge)
        node = node.parent
    return np.concatenate(edges[::-1])


def assert_sound(engine):
    """The tree has what cells have, numbers are used once, and nothing that is kept was moved."""
    space = engine.space
    host, prefixes = space._host, space._prefixes
    tree, n_seq = prefixes._tree, space.n_seq_max
    kept = {name for name in tree if name >= host.first_kept}
    running = {state.seq_id: state for state in engine.running}
    pinned = set(prefixes.pinned.values())
    assert pinned <= kept and tree._locked == (set(tree) - kept) | pinned
    assert set(tree) - kept <= set(running)
    assert kept | set(prefixes._free) == set(range(host.first_kept, host.first_kept + N_KEPT))
    assert len(kept) == prefixes.n_kept and not kept & set(prefixes._free)
    if prefixes.by_sequence:
        assert len(kept) + len(running) <= n_seq
    for name in tree:
        n = tree.n_tokens(name)
        known = history.tokens(host.history, name)
        assert tokens_of(tree, name).tolist() == known[:n].tolist()
        if name in kept:
            assert len(known) == n > 0
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
    for group in host.complete[:1]:
        assert prefixes.n_idle == np.count_nonzero(prefixes._idle(group))

"""Snapshots of no runtime, of any size, and a comparison to the bit."""

import numpy as np

from kvrt.cellcache.history import TokenHistory
from kvrt.session import SamplingState, Snapshot
from kvrt.session.fingerprint import completed
from kvrt.session.snapshot import BLOCK_CELLS, GroupPart, KVBlock, StatePart

TYPES = {"float32": "f32", "float16": "f16", "uint16": "bf16"}


def snapshot(*, n_cells=(40,), layers=2, dtype="float32", states=False, seed=0):
    """Groups with so many cells in use; rows and tokens depend on the seed and their number."""
    n = max([*n_cells, 10])
    groups = tuple(group(i, held, n, layers, dtype, seed) for i, held in enumerate(n_cells))
    entries = np.stack([np.arange(n), noise(n, seed).view(np.uint32) % 90, np.arange(n)])
    return Snapshot(
        fingerprint=completed(
            {
                "model": {"n_vocab": 90, "weights": "x"},
                "groups": [
                    {"layers": list(range(layers)), "n_kv_heads": 2, "head_dim": 4} for _ in n_cells
                ],
                "recurrent": {"layers": [5, 7], "shapes": [[2, 3], [4]]} if states else None,
                "type_k": TYPES[dtype],
                "type_v": TYPES[dtype],
            }
        ),
        groups=groups,
        states=state_part(n, seed) if states else None,
        history=TokenHistory(pieces={0: (entries.astype(np.int32),)}, n_marks=n),
        ga_i={0: 4},
        logits={0: (n - 1, noise(90, seed))},
        draws={0: SamplingState(token=3, n_drawn=9, sampling={"temp": 0.5, "top_k": 40})},
    )


def noise(n, seed):
    return np.random.default_rng(seed).standard_normal(n, np.float32)


def group(i, n, n_tokens, layers, dtype, seed):
    """The first n of so many tokens; the others are lost, as in a group with a window."""
    # Row r is the same however many follow it, as in a cache that grows.
    rng = np.random.default_rng((seed, i))
    data = rng.integers(0, 2**14, (n, 2, layers, 2, 4), np.uint16)
    data = data.view(dtype) if dtype != "float32" else data.astype(np.float32)
    rows = np.moveaxis(data, (1, 2), (0, 1))
    return GroupPart(
        n_cells=n + 3,
        head=n,
        index=np.arange(n, dtype=np.int32) + 1,
        pos=np.arange(n, dtype=np.int32),
        seqs=np.ones((n, 1), np.uint32),
        lost={0: ((n, n_tokens),)} if n < n_tokens else {},
        blocks=[
            KVBlock(k=rows[0][:, a : a + BLOCK_CELLS], v=rows[1][:, a : a + BLOCK_CELLS])
            for a in range(0, n, BLOCK_CELLS)
        ],
    )


def state_part(n_tokens, seed):
    rng = np.random.default_rng(seed)
    tables = tuple(
        tuple(rng.standard_normal((3, *shape), np.float32) for shape in ((2, 3), (4,)))
        for _ in range(2)
    )
    return StatePart(
        held={0: ((n_tokens - 3, 0), (n_tokens - 2, 2), (n_tokens - 1, 1))}, tables=tables
    )


def arrays(taken):
    for g in taken.groups:
        yield from (g.index, g.pos, g.seqs)
        for block in g.blocks:
            yield from (block.k, block.v)
    for layer in taken.states.tables if taken.states else ():
        yield from layer
    for s in taken.seq_ids:
        yield np.concatenate(taken.history.pieces[s], axis=1)
    for s in sorted(taken.logits):
        yield taken.logits[s][1]


def assert_equal(a, b):
    left, right = ([np.asarray(x) for x in arrays(s)] for s in (a, b))
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    assert a.fingerprint == b.fingerprint
    assert (a.ga_i, a.draws, a.history.n_marks) == (b.ga_i, b.draws, b.history.n_marks)
    assert {s: p for s, (p, _) in a.logits.items()} == {s: p for s, (p, _) in b.logits.items()}
    for g, h in zip(a.groups, b.groups, strict=True):
        assert (g.n_cells, g.head, g.lost) == (h.n_cells, h.head, h.lost)
    assert (a.states and a.states.held) == (b.states and b.states.held)

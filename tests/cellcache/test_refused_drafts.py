"""What refused drafts leave of windows: all that the next token sees, whose cells are used again.

A round of a token and its drafts takes cells for all of them. Those that only the first of them
does not see any more may be used again, for it may be the only one that stays.
"""

import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec
from kvrt.cellcache import window
from kvrt.cellcache.host_cells import HostCells
from kvrt.cells.cells import owned

pytestmark = pytest.mark.slow

MASKS = [MaskSpec(kind="window", size=9), MaskSpec(kind="chunked", size=8)]
N_DRAFT, N_SEQ = 5, 3


def opened(mask):
    """Cells of three sequences, as few as there may be."""
    specs = [
        GroupSpec(layers=(i,), n_kv_heads=1, head_dim=8, rope=None, mask=m)
        for i, m in enumerate((mask, MaskSpec()))
    ]
    sizes = {"n_ctx": 1024, "n_seq_max": N_SEQ, "block_size": 4}
    return HostCells(specs, None, CacheConfig(**sizes, n_ubatch=2 * (N_DRAFT + 1)))


def append(host, ends, tokens, n_kept):
    """A step of so many tokens by sequence, of which the first n_kept stay."""
    seq_ids = np.repeat(np.array(list(tokens), np.int32), list(tokens.values()))
    pos = np.concatenate(
        [np.arange(ends[s], ends[s] + n, dtype=np.int32) for s, n in tokens.items()]
    )
    stays = np.concatenate([np.arange(n) < n_kept[s] for s, n in tokens.items()])
    plan = host.find(seq_ids, {s: ends[s] for s in tokens})
    host.append(host.kept(plan, stays), pos[stays], pos[stays])
    for s in tokens:
        ends[s] += n_kept[s]


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.kind)
def test_the_next_token_finds_its_window_whichever_drafts_were_refused(mask):
    rng = np.random.default_rng(4)
    host, ends, n_lost = opened(mask), dict.fromkeys(range(N_SEQ), 0), 0
    rolling = host.groups[0]
    assert rolling.group.rolls
    # They are of very different lengths, so that the least positions are not the oldest tokens.
    for s, n in enumerate((96, 36, 12)):
        for _ in range(n // 12):
            append(host, ends, {s: 12}, {s: 12})
    for i in range(120):
        tokens = dict.fromkeys(rng.permutation(N_SEQ)[:2].tolist(), N_DRAFT + 1)
        append(host, ends, tokens, {s: 1 + (i + k) % (N_DRAFT + 1) for k, s in enumerate(tokens)})
        for s, end in ends.items():
            held = set(rolling.cells.pos[owned(rolling.cells, s)].tolist())
            assert held >= set(range(window.horizon(mask, end), end)), (i, s)
            assert host.resumes_at(s, end) and host.pos_max(s) == end - 1
            n_lost += len(rolling.group.lost.get(s, ()))
    assert n_lost > 300

"""Blocks that sequences share, read once for all: against attention of each sequence in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec, SelfExtend
from kvrt.attention import LayerAttention, LayerKV, SeqView, TokenQKV, attend, grouped, rope, xla
from kvrt.cells.slots import SharedBlocks
from kvrt.sizes import store_spec
from kvrt.store import codec
from kvrt.store import kv as kv_store
from tests.interpreted import GPU, TPU
from tests.marks import slow
from tests.oracle import rotated

pytestmark = pytest.mark.slow

OPTIMISED = False  # toys: what is compiled runs once
H, G, D, B = 2, 3, 32, 4
ROPE = RopeSpec(n_rot=D, base=50.0)
# By sequence, its blocks in order: a system prompt, below it two documents, and own blocks. The
# last has nothing but what it shares, the one before it shares nothing, the first has no token.
LISTS = [
    [],
    [3, 9, 1, 7, 14],
    [3, 9, 1, 7, 2, 12, 5],
    [3, 9, 4, 8],
    [3, 9, 4, 13, 10],
    [6, 11, 15],
    [3, 9],
]
S, N = len(LISTS), 18
# First blocks of the lists that are read as runs, and for whom; the rest is read by each.
RUNS = {
    "nothing": [],
    "one level": [((3, 9), (1, 2, 3, 4, 6))],
    "some of it": [((3, 9), (1, 3))],
    "two levels": [((3, 9), (1, 2, 3, 4, 6)), ((1, 7), (1, 2)), ((4,), (3, 4))],
    "three levels": [
        ((3,), (1, 2, 3, 4, 6)),
        ((9,), (1, 2, 3, 4, 6)),
        ((1, 7), (1, 2)),
        ((4,), (3, 4)),
    ],
    "two runs": [((3, 9, 1, 7), (1, 2)), ((3, 9, 4), (3, 4))],
}
MASKS = [
    MaskSpec(),
    MaskSpec(kind="window", size=9),
    MaskSpec(kind="window", size=7, n_sink=3),
    MaskSpec(kind="chunked", size=8),
]


class Case:
    """Sequences over a store, whose last blocks are part-filled; each decodes a token."""

    def __init__(self, mask=MASKS[0], dtype="f32", mode="write", seed=0):
        rng = np.random.default_rng(seed)
        self.group = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=ROPE, mask=mask)
        self.mode = mode
        lengths = [max(len(x) * B - (i % 3 if x[2:] else 0), 0) for i, x in enumerate(LISTS)]
        self.pos = np.array([n if n else -1 for n in lengths], np.int32)
        bits = np.where(self.pos >= 0, 1 << np.arange(S), 0)
        self.cell_pos, seqs = np.full(N * B, -1, np.int32), np.zeros(N * B, np.uint32)
        for s, (blocks, n) in enumerate(zip(LISTS, lengths, strict=True)):
            cells = (np.array(blocks, int)[:, None] * B + np.arange(B)).reshape(-1)[:n]
            self.cell_pos[cells] = np.arange(n)
            seqs[cells] |= np.uint32(1 << s)
        q, k, v = (rng.standard_normal((S, h, D)) for h in (G * H, H, H))
        self.q, self.k, self.v = (jnp.asarray(3 * x, jnp.float32) for x in (q, k, v))
        # Sharp scores, for a flat softmax hides mistakes.
        old = [rng.standard_normal((N * B, H, D)).astype(np.float32) for _ in "kv"]
        cells = np.arange(N * B, dtype=np.int32)
        if mode == "write":
            old[0] = self.rotated(old[0], np.maximum(self.cell_pos, 0))
        config = CacheConfig(n_ctx=N * B, block_size=B, type_k=dtype, type_v=dtype)
        store = kv_store.create(store_spec(self.group, config))
        self.store = kv_store.write_kv(store, cells, [jnp.asarray(old[0])], [jnp.asarray(old[1])])
        # One of padding, and cells that nobody owns any more hold anything.
        self.seqs, self.bits = seqs, bits.astype(np.uint32)[:, None]

    def rotated(self, x, pos):
        return rotated(np.asarray(x), pos, ROPE.base).astype(np.float32)

    def view(self, runs):
        lists, tables = [list(x) for x in LISTS], np.zeros((4, N), np.int32)
        n_blocks, members = np.zeros(4, np.int32), np.full((4, S), S, np.int32)
        for i, (blocks, of) in enumerate(runs):
            tables[i, : len(blocks)], n_blocks[i], members[i, : len(of)] = blocks, len(blocks), of
            for s in of:
                assert lists[s][: len(blocks)] == list(blocks)
                lists[s] = lists[s][len(blocks) :]
        # What is not read holds a block of another.
        own = np.stack([np.array([*x, *[6] * (N - len(x))], np.int32) for x in lists])
        shared = SharedBlocks(tables=tables, n_blocks=n_blocks, members=members)
        return SeqView(
            pos=jnp.asarray(self.pos),
            bits=jnp.asarray(self.bits),
            blocks=jnp.asarray(own),
            n_blocks=jnp.asarray([len(x) for x in lists], jnp.int32),
            cell_pos=jnp.asarray(self.cell_pos.reshape(N, B)),
            cell_seqs=jnp.asarray(self.seqs.reshape(N, B, 1)),
            shared=jax.tree.map(jnp.asarray, shared),
        )

    def attended(self, view, sinks=None, implementation="chunked", extend=None):
        unrotated = self.mode == "read"
        tables = rope.make(ROPE, view, N * B, unrotated=unrotated)
        far = extend and grouped.grouped_tables(ROPE, view, N * B, extend, unrotated=unrotated)
        how = LayerAttention(
            group=self.group,
            rope=tables if unrotated else None,
            grouped=far and far.cells,
            sinks=sinks,
            implementation=implementation,
        )
        qkv = TokenQKV(
            q=tables.rotate_tokens(self.q),
            k=tables.rotate_tokens(self.k),
            v=self.v,
            grouped=far and far.tokens(self.q, self.k),
        )
        return attend(qkv, LayerKV(k=self.store.k[0], v=self.store.v[0]), view, how)

    def by_hand(self, sinks=None):
        """Each sequence alone: its own cells and its token, in float64."""
        keys = np.moveaxis(np.asarray(codec.decode(self.store.k[0], -2)), 3, 1).reshape(N * B, H, D)
        values = np.moveaxis(np.asarray(codec.decode(self.store.v[0], -1)), 2, 1)
        values = values.reshape(N * B, H, D)
        if self.mode == "read":
            keys = self.rotated(keys, np.maximum(self.cell_pos, 0))
        at = np.maximum(self.pos, 0)
        q, own = self.rotated(self.q, at), self.rotated(self.k, at)
        out, lse = np.zeros((S, G * H, D)), np.full((S, G * H), np.nan)
        for s, h in np.ndindex(S, G * H):
            n, kv = int(self.pos[s]), h // G
            if n < 0:
                continue
            mine = self.seqs & (1 << s) != 0
            where = [c for c in np.flatnonzero(mine) if self.sees(int(self.cell_pos[c]), n)]
            k = np.concatenate([keys[where, kv], own[s, None, kv]]).astype(np.float64)
            v = np.concatenate([values[where, kv], np.asarray(self.v)[s, None, kv]])
            score = k @ q[s, h] / np.sqrt(D)
            if sinks is not None:
                score, v = np.append(score, sinks[h]), np.concatenate([v, np.zeros((1, D))])
            weight = np.exp(score - score.max())
            out[s, h] = weight @ v / weight.sum()
            lse[s, h] = score.max() + np.log(weight.sum())
        return out, lse

    def sees(self, k, q):
        mask = self.group.mask
        if k < mask.n_sink or mask.kind == "full":
            return True
        return k > q - mask.size if mask.kind == "window" else k >= q // mask.size * mask.size


def assert_equal(found, wanted):
    real = ~np.isnan(wanted[1])
    np.testing.assert_allclose(np.asarray(found[0])[real], wanted[0][real], atol=1e-5)
    np.testing.assert_allclose(np.asarray(found[1])[real], wanted[1][real], atol=1e-5)
    assert np.isfinite(found[0]).all()  # padding too


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """What is traced has the size of a tile, so nothing of other modules, nor of this one later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "TILE", 2 * B)
        attend.clear_cache()
        yield
    attend.clear_cache()


KERNELS = [pytest.param(x, marks=pytest.mark.slow) for x in (GPU, TPU)]


@pytest.mark.parametrize("implementation", ["chunked", "reference", *KERNELS])
def test_equals_each_sequence_alone(implementation):
    """No run, runs of some, of several levels; empty lists, a token of padding; with sinks."""
    case = Case()
    sinks = np.linspace(-2, 5, G * H).astype(np.float32)
    for runs in RUNS.values():
        view = case.view(runs)
        found = case.attended(view, jnp.asarray(sinks), implementation)
        assert_equal(found, case.by_hand(sinks))


@pytest.mark.parametrize("mask", MASKS[1:], ids=lambda m: f"{m.kind}-{m.n_sink}")
def test_masks_hold_within_what_is_shared(mask):
    case = Case(mask)
    for runs in RUNS.values():
        assert_equal(case.attended(case.view(runs)), case.by_hand())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_keys_and_values(dtype):
    case = Case(dtype=dtype)
    for runs in RUNS.values():
        assert_equal(case.attended(case.view(runs)), case.by_hand())


def test_keys_that_are_rotated_when_they_are_read():
    case = Case(dtype="int8", mode="read")
    for runs in RUNS.values():
        assert_equal(case.attended(case.view(runs)), case.by_hand())


@pytest.mark.parametrize("mode", ["read", slow("write")])
def test_grouped_positions_reach_what_is_shared(mode):
    """SelfExtend as in the paper: as without runs, which its own tests judge."""
    unrotated, extend = Case(mode="read"), SelfExtend(ga_n=2, ga_w=6, kind="paper")
    wanted = unrotated.attended(unrotated.view([]), extend=extend)
    plain = unrotated.attended(unrotated.view([]))
    assert np.abs(wanted[0] - plain[0]).max() > 1e-2
    case = Case(mode=mode)
    for runs in RUNS.values():
        found = case.attended(case.view(runs), extend=extend)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def test_merging_outputs_without_their_weights_is_seen():
    """The control: the mean of two outputs is not attention over both."""
    case = Case()
    view = case.view(RUNS["one level"])
    own = case.attended(dataclasses.replace(view, shared=None))[0]
    none = dataclasses.replace(view, n_blocks=jnp.zeros_like(view.n_blocks))
    mean = (np.asarray(own) + np.asarray(case.attended(none)[0])) / 2
    assert np.abs(mean[1:5] - case.by_hand()[0][1:5]).max() > 0.1


def test_a_damaged_key_reaches_its_members_alone():
    """What sequences share may be damaged, and what others share with each other is not touched."""
    case = Case()
    view, clean = case.view(RUNS["two runs"]), case.attended(case.view(RUNS["two runs"]))[0]
    case.store = dataclasses.replace(case.store, k=(case.store.k[0].at[1, :, 0, 2].set(jnp.nan),))
    found = np.asarray(case.attended(view)[0])
    others = [3, 4, 5, 6]
    assert np.isnan(found[[1, 2]]).all() and not np.isnan(found[others]).any()
    np.testing.assert_array_equal(found[others], np.asarray(clean)[others])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_many_sequences_read_runs_a_few_at_a_time(n, monkeypatch):
    """Widths of a run are no shapes: members of one, of two and of all."""
    monkeypatch.setattr(SharedBlocks, "widths", property(lambda self: (1, 2, S)))
    case = Case()
    found = case.attended(case.view([((3, 9, 1), (1, 2)[:n]), ((3, 9), (3, 4, 6)[:n])]))
    assert_equal(found, case.by_hand())

"""A runtime's sequences in blocks and back: nothing that they compute tells the difference."""

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, ContextShift, MaskSpec, Runtime, SelfExtend
from kvrt import cells as kc
from kvrt.cache import schedules
from kvrt.errors import BadConfig, BadRange, BadSequence, CacheFull, UsageError
from tests.toys import HybridLm, ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

B = 8
TEXT = [(7 * i + i // 5) % 32 for i in range(80)]
WINDOW, CHUNKS = MaskSpec(kind="window", size=12), MaskSpec(kind="chunked", size=16)
MODELS = {
    "full": lambda: ToyLm(n_vocab=32, n_layers=2),
    "window": lambda: ToyLm(n_vocab=32, n_layers=2, masks=[WINDOW, MaskSpec()]),
    "chunked": lambda: ToyLm(n_vocab=32, n_layers=2, masks=[MaskSpec(), CHUNKS]),
    "recurrent": HybridLm,
}
# Logits of 6 and less: only which tokens are summed together, block by block, differs.
TOLERANCE = 1e-5


def build(model, **change):
    policy = change.pop("policy", None)
    config = {"n_ctx": 96, "block_size": B, "n_ubatch": 16, "n_seq_max": 3, **change}
    return Runtime(model, CacheConfig(**config), policy=policy)


@pytest.fixture(
    scope="module",
    params=[
        (name, mode)
        for name in MODELS
        for mode in ("write", "read")
        if (name, mode) != ("chunked", "read")
    ],
    ids=lambda x: ", ".join(x),
)
def shared(request):
    """One runtime a model and key frame, so that each program compiles once."""
    name, mode = request.param
    return build(MODELS[name](), rope=mode)


@pytest.fixture
def at(shared):
    shared.clear()
    return shared


@pytest.fixture(scope="module")
def full():
    """A runtime that is asked, and computes little."""
    return build(ToyLm(n_vocab=32, n_layers=1), n_ctx=32)


def held(at, seq=0):
    """By group and position the rows of a sequence, as bytes."""
    out = []
    for cells, store in zip(at.group_cells, at.cache.stores, strict=True):
        k = [np.asarray(x).transpose(0, 3, 1, 2).reshape(-1, *x.shape[1:3]) for x in store.k]
        v = [np.asarray(x).transpose(0, 2, 1, 3).reshape(-1, *x.shape[1::2]) for x in store.v]
        mine = np.flatnonzero(kc.owned(cells, seq)).tolist()
        out.append({int(cells.pos[c]): b"".join(x[c].tobytes() for x in k + v) for c in mine})
    return out


def state_of(at):
    """Every byte on either side, which sequences lie in blocks, and what was counted."""
    arrays = [np.array(x).tobytes() for x in jax.tree.leaves((at.group_cells, at.cache))]
    return arrays, [at.table(s) for s in range(3)], at.n_free, at.stats()


def begun(at):
    """Sequence 0 between tokens of sequence 1, so that no token lies in its place."""
    at.append(TEXT[40:43], 1)
    at.append(TEXT[:21], 0)
    at.append(TEXT[43:45], 1)


def goes_on(at, between=lambda: None):
    """Logits of further tokens of both sequences, and text that follows."""
    out = [at.append(TEXT[21:26], 0, out_ids=range(5))]
    between()
    for a, b in zip(TEXT[26:29], TEXT[45:48], strict=True):
        out += [x[None] for x in at.decode({0: a, 1: b}).values()]
    out.append(at.append(TEXT[29:39], 0, out_ids=range(10)))
    tokens = [t.id for t in at.generate(12, 0, stride=4)]
    out.append(at.probe(TEXT[:2], 0))
    return np.concatenate(out), tokens, [at.token_history(s) for s in (0, 1)]


def alike(a, b):
    np.testing.assert_allclose(a[0], b[0], rtol=0, atol=TOLERANCE)
    assert a[1] == b[1]
    for x, y in zip(jax.tree.leaves(a[2]), jax.tree.leaves(b[2]), strict=True):
        np.testing.assert_array_equal(x, y)


def lies_well(at, seq):
    """The table of each group that keeps all positions says where each token is."""
    for cells, table in zip(at.group_cells, at.table(seq), strict=True):
        if len(cells.pos) < at.config.n_ctx:
            assert table is None
            continue
        mine = np.flatnonzero(kc.owned(cells, seq))
        places = np.array(table)[cells.pos[mine] // B] * B + cells.pos[mine] % B
        np.testing.assert_array_equal(places, mine)


@pytest.mark.slow
def test_what_follows_is_as_if_nothing_had_been_converted(at):
    begun(at)
    expected = goes_on(at)
    at.clear()
    begun(at)
    before, pos = held(at), at.seq_pos_max()
    assert at.to_blocks(0) == 21 and at.to_blocks(0) == 0
    assert held(at) == before and at.seq_pos_max() == pos
    lies_well(at, 0)
    alike(goes_on(at), expected)
    lies_well(at, 0)
    before = held(at)
    at.to_cells(0)
    assert held(at) == before and at.table(0) == (None,) * len(at.group_cells)


@pytest.mark.slow
def test_whole_blocks_stay_and_so_does_what_follows(at):
    at.append(TEXT[:21])
    expected = goes_on(at)
    at.clear()
    at.append(TEXT[:21])
    place = [c.pos.tobytes() for c in at.group_cells]
    assert at.to_blocks(0) == 0
    assert [c.pos.tobytes() for c in at.group_cells] == place
    assert [t for t in at.table(0) if t is not None] == [(0, 1, 2)]
    # Back in the middle of it: tokens go where they go, and the rest stays.
    alike(goes_on(at, between=lambda: at.to_cells(0)), expected)
    assert at.table(0) == (None,) * len(at.group_cells)


@pytest.mark.slow
def test_both_sequences_in_blocks_share_and_part(at):
    at.append(TEXT[:21], 0)
    at.seq_cp(0, 1)
    expected = goes_on(at)
    at.clear()
    at.append(TEXT[:21], 0)
    at.seq_cp(0, 1)
    n_free = at.n_free
    assert at.to_blocks(0) == at.to_blocks(1) == 0
    # Blocks 0 to 2 are shared, and the rest of the last one is kept.
    assert at.n_free == n_free - 3
    assert at.table(0) == at.table(1)
    alike(goes_on(at), expected)
    lies_well(at, 0)
    lies_well(at, 1)
    tables = [next(t for t in at.table(s) if t is not None) for s in (0, 1)]
    assert tables[0][:2] == tables[1][:2] == (0, 1) and tables[0][2] != tables[1][2]


@pytest.mark.slow
def test_a_restored_sequence_goes_on_in_blocks_as_in_cells(at):
    begun(at)
    taken = at.snapshot()
    expected = goes_on(at)
    at.to_blocks(0)
    at.restore(taken)
    assert at.table(0) == (None,) * len(at.group_cells)
    at.to_blocks(0)
    # Sequence 0 has left block 0, where three of five tokens of the other lie in their places.
    assert at.to_blocks(1) == 2
    alike(goes_on(at), expected)
    lies_well(at, 0)
    lies_well(at, 1)
    # Of a sequence in blocks as well.
    at.restore(taken)
    at.to_blocks(0)
    again = at.snapshot()
    at.clear()
    at.restore(again)
    assert at.to_blocks(0) == 0
    alike(goes_on(at), expected)


@pytest.mark.slow
def test_a_small_cache_goes_on_the_same(full):
    def runs(n_before, convert):
        full.clear()
        if n_before:
            full.append(TEXT[40 : 40 + n_before], 1)
        full.append(TEXT[:10])
        n = full.to_blocks(0) if convert else None
        out = [full.append(TEXT[10:13], out_ids=range(3))]
        if convert:
            lies_well(full, 0)
            full.to_cells(0)
        return n, np.concatenate([*out, full.append(TEXT[13:14]), full.probe(TEXT[:2])])

    # Where nothing has to be copied and nobody is beside it, all is the same to the bit.
    n, out = runs(0, True)
    assert n == 0
    np.testing.assert_array_equal(out, runs(0, False)[1])
    n, out = runs(3, True)
    assert n == 10
    np.testing.assert_allclose(out, runs(3, False)[1], rtol=0, atol=TOLERANCE)


def test_a_hole_is_filled_in_its_places(full):
    full.clear()
    full.append(TEXT[:20])
    full.to_blocks(0)
    before = held(full)
    full.seq_rm(0, 5, 17)
    assert full.table(0) == ((0, -1, 2),)
    # Places in blocks 0 and 2 are kept: of 12 cells that were freed, 8 are anybody's.
    assert full.n_free == 8 + 8
    full.fill(TEXT[5:17], 0, 5)
    assert full.table(0) == ((0, 1, 2),)
    # What a token sees is what it saw before.
    after = held(full)
    for p in range(20):
        a, b = (np.frombuffer(x[0][p], np.float32) for x in (before, after))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_keys_that_wait_for_their_turn_wait_in_their_new_place(full):
    full.clear()
    full.append(TEXT[:12])
    full.seq_rm(0, 0, 3)
    full.seq_add(0, 3, None, -3)
    expected = np.asarray(full.probe(TEXT[:3]))
    full.clear()
    full.append(TEXT[:12])
    full.seq_rm(0, 0, 3)
    full.seq_add(0, 3, None, -3)
    assert full.to_blocks(0) == 9 and full.cells.delta.any()
    np.testing.assert_allclose(full.probe(TEXT[:3]), expected, rtol=0, atol=TOLERANCE)


def crowded(at):
    """32 cells: 9 tokens in blocks 0 and 1, 5 of them shared, 13 of the others in 2 and 3."""
    at.clear()
    at.append(TEXT[:9])
    at.to_blocks(0)
    at.seq_cp(0, 2, 0, 5)
    at.append(TEXT[30:31], 2)
    at.append(TEXT[30:42], 1)
    assert at.n_free == 3 and at.table(0) == ((0, 1),)


REFUSED = {
    "append": (
        lambda r: r.append(TEXT[:8]),
        CacheFull,
        "8 tokens in blocks: 1 empty blocks of 8 cells are needed, 0 of 4 are empty; remove "
        "positions, pack the cache with defrag while all sequences are in cells, or raise n_ctx",
    ),
    "fill": (
        lambda r: r.fill(TEXT[:8], 0, 9),
        CacheFull,
        "8 tokens in blocks: 1 empty blocks of 8 cells are needed, 0 of 4 are empty; remove "
        "positions, pack the cache with defrag while all sequences are in cells, or raise n_ctx",
    ),
    "append to another": (
        lambda r: r.append(TEXT[:4], 1),
        CacheFull,
        "4 tokens need 4 cells, 3 of 32 are free; turn on context shift or raise n_ctx",
    ),
    "room": (
        lambda r: schedules.make_room(r._cache, {0: 8}),
        CacheFull,
        "1 empty blocks of 8 cells are ne",
    ),
    "convert": (
        lambda r: r.to_blocks(2),
        CacheFull,
        "sequence 2 in blocks: 1 empty blocks of 8 cells are needed, 0 of 4 are empty",
    ),
    "add": (
        lambda r: r.seq_add(0, 4, None, 2),
        BadRange,
        "5 positions of sequence 0 cannot move: it lies in blocks, where the position is the "
        "place; take it out with to_cells first",
    ),
    "div": (lambda r: r.seq_div(0, 0, None, 2), BadRange, "9 positions of sequence 0 cannot move"),
    "cp": (
        lambda r: r.seq_cp(1, 0, 10),
        BadRange,
        "sequence 0 lies in blocks and cannot share 2 cells of sequence 1, which are not its "
        "places; take it out with to_cells first",
    ),
    "defrag": (
        lambda r: r.defrag(),
        UsageError,
        "defrag would tear blocks of sequences [0] apart; take them out with to_cells first",
    ),
    "sequence": (lambda r: r.to_blocks(3), BadSequence, "sequence 3 does not exist"),
    "cells of a sequence": (lambda r: r.to_cells(3), BadSequence, "sequence 3 does not exist"),
    "table": (lambda r: r.table(-1), BadSequence, "sequence -1 does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_leaves_no_trace(full, case):
    call, error, message = REFUSED[case]
    crowded(full)
    before = state_of(full)
    with pytest.raises(error) as caught:
        call(full)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert state_of(full) == before


def test_room_is_what_can_be_taken_in(full):
    crowded(full)
    full.append(TEXT[:7])
    with pytest.raises(CacheFull):
        full.append([1])
    with pytest.raises(CacheFull):
        full.decode({0: 1, 1: 2})
    full.append(TEXT[:3], 1)
    assert full.n_free == 0 and full.seq_pos_max(0) == 15 and full.seq_pos_max(1) == 14
    # Tokens that others share are copied by who writes to their block.
    full.seq_rm(1)
    full.seq_rm(2, 5)
    full.seq_rm(0, 3)
    assert full.table(0) == ((0,),)
    full.append(TEXT[3:5])
    assert full.table(0) == ((1,),) and full.seq_pos_max(2) == 4
    tokens = [t.id for t in full.generate(16, stride=4)]
    assert len(tokens) == 16


def test_what_moves_positions_or_keeps_none_is_refused():
    cases = [
        (build(MODELS["full"](), policy=ContextShift()), "ContextShift moves positions"),
        (build(MODELS["full"](), self_extend=SelfExtend(ga_n=2, ga_w=4)), "SelfExtend moves pos"),
        (build(HybridLm(mask=WINDOW)), "no layer of this model keeps the cells of all positions"),
        (build(HybridLm(attention=False)), "no layer of this model keeps the cells"),
    ]
    for at, message in cases:
        with pytest.raises(BadConfig, match=f"sequence 0 cannot lie in blocks.*{message}"):
            at.to_blocks(0)


@pytest.mark.slow
def test_a_cache_with_blocks_is_not_packed_by_itself():
    at = build(MODELS["full"](), n_ctx=2304, block_size=64, n_ubatch=512, defrag_threshold=0.1)
    for part in range(0, 2240, 448):
        at.append([(part + i) % 32 for i in range(448)])
    at.to_blocks(0)
    at.seq_rm(0, 64, 1500)
    table = at.table(0)
    at.flush()
    assert at.table(0) == table and at.stats().n_defrag == 0
    at.to_cells(0)
    at.seq_rm(0, 1500, 1501)
    at.flush()
    assert at.stats().n_defrag == 1 and kc.n_kv(at.cells) == kc.n_used(at.cells)


@pytest.mark.slow
def test_what_one_group_shares_and_another_has_copied_is_not_shared_again():
    """Blocks have copies of cells that a window's layers, which lie in cells, still share."""
    model = ToyLm(masks=(MaskSpec(), MaskSpec(kind="window", size=3)))
    runtime = Runtime(model, CacheConfig(n_ctx=64, n_seq_max=3, n_ubatch=8, block_size=8))
    runtime.append([3], 1)
    runtime.append([1, 2], 0)
    runtime.seq_cp(0, 2, 1)
    assert runtime.to_blocks(2) == 1
    before = [cells.seqs.copy() for cells in runtime.group_cells]
    with pytest.raises(UsageError, match=r"share position 1 in some layers .* lay in blocks"):
        runtime.seq_cp(2, 0)
    for cells, seqs in zip(runtime.group_cells, before, strict=True):
        assert (cells.seqs == seqs).all()
    runtime.seq_rm(0, 1)
    runtime.seq_cp(2, 0)
    assert runtime.token_history(0)[0].tolist() == [0, 1]

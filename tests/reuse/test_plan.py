"""Plans of reuse, carried out on the real text of a sequence and on toy runtimes."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrt import CacheConfig, MaskSpec, Runtime
from kvrt.cellcache import history as texts
from kvrt.cellcache.checkpoint.resume import ResumePositions
from kvrt.cells.edits import Remove, Shift
from kvrt.errors import BadRange, BadToken, CannotRewind, UsageError
from kvrt.reuse import diff
from kvrt.reuse.plan import Evaluate, KeptChunk, operations, plan_reuse
from kvrt.reuse.reasons import Reason, Recomputed
from tests.toys import RowModel

A, B, C, X = (np.arange(i, i + 40) for i in (0, 100, 200, 300))


def held(*parts, start=0):
    ids = np.concatenate([*parts, []]).astype(np.int32)
    return np.arange(start, start + len(ids), dtype=np.int32), ids


def from_on(earliest):
    """0, and all positions from one on."""
    return ResumePositions(gaps=((1, earliest),) if earliest > 1 else ())


def joined(*parts):
    return np.concatenate(parts).tolist()


def miss(start, end, reason):
    return Recomputed(start=start, end=end, reason=reason)


def carried_out(held, wanted, reuse):
    """What a sequence holds after the plan; no operation may meet what it does not mean."""
    zero = np.zeros(len(held[0]), np.int32)
    text = texts.append(texts.TokenHistory(), zero, *held) if len(zero) else texts.TokenHistory()
    for op in operations(reuse):
        pos = texts.positions(text, 0)
        if isinstance(op, Remove):
            end = op.p1 if op.p1 is not None else reuse.end
            assert np.any((pos >= op.p0) & (pos < end)) or reuse.end > len(held[0])
            text = texts.apply(text, op)
        elif isinstance(op, Shift):
            assert set(range(op.p0, op.p1)) <= set(pos.tolist())
            text = texts.apply(text, op)
        else:
            new = np.arange(op.start, op.end, dtype=np.int32)
            ids = np.array(wanted[op.start : op.end], np.int32)
            text = texts.append(text, np.zeros(len(new), np.int32), new, ids)
        after = texts.positions(text, 0)
        if isinstance(op, (Shift, Evaluate)):
            twice = after[1:][after[1:] == after[:-1]]
            assert not len(twice), f"{op} met positions {twice}"
    return texts.entries(text, 0)


def check(held, wanted, reuse, min_chunk):
    pos, ids, _ = carried_out(held, wanted, reuse)
    assert pos.tolist() == list(range(len(wanted)))
    assert ids.tolist() == list(wanted)
    # The last token is evaluated, and every evaluated token has one reason.
    assert reuse.evaluate[-1][1] == len(wanted)
    evaluated = [i for a, b in reuse.evaluate for i in range(a, b)]
    assert evaluated == [i for m in reuse.reasons for i in range(m.start, m.end)]
    kept = [i for c in reuse.keeps for i in range(c.start, c.end)]
    assert sorted([*range(reuse.n_prefix), *kept, *evaluated]) == list(range(len(wanted)))
    assert reuse.n_evaluated == len(evaluated) and reuse.n_reused == len(wanted) - len(evaluated)
    assert all(c.p1 - c.p0 >= min_chunk for c in reuse.keeps)
    for a, b in zip(reuse.evaluate, reuse.evaluate[1:], strict=False):
        assert a[1] < b[0]
    assert reuse.approximate or not reuse.keeps


# --- every case -------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, 5), max_size=12)
PARTS = st.lists(st.sampled_from([A[:9], B[:12], C[:7], A[:3], X[:2]]).map(list) | IDS, max_size=6)
TEXTS = PARTS.map(lambda parts: [int(t) for p in parts for t in p])


@st.composite
def edited(draw):
    """A text, and what a few deletions, insertions and swaps make of it."""
    old = draw(TEXTS)
    new = list(old)
    for _ in range(draw(st.integers(0, 3))):
        i = draw(st.integers(0, len(new)))
        j = draw(st.integers(i, min(len(new), i + 10)))
        new[i:j] = draw(IDS)
    return old, new or [0]


@given(
    edited() | st.tuples(TEXTS, TEXTS.filter(bool)),
    st.booleans(),
    st.integers(1, 9),
    st.sampled_from([0, 0, 2, 5, 20]),
    st.none() | st.integers(0, 30),
)
@settings(max_examples=80)
def test_a_plan_gives_the_prompt(pair, chunks, min_chunk, earliest, n_exact):
    old, wanted = pair
    was = held(old)
    reuse = plan_reuse(
        was, wanted, chunks=chunks, min_chunk=min_chunk, at=from_on(earliest), n_exact=n_exact
    )
    check(was, wanted, reuse, min_chunk)
    assert chunks or not reuse.approximate
    cut = reuse.n_prefix < len(old)
    assert not (cut and reuse.n_prefix < earliest) or (reuse.n_prefix == 0 and not reuse.keeps)
    if not earliest and n_exact is None:
        common = diff.common_prefix(was[1], np.array(wanted, np.int32))
        assert reuse.n_prefix == min(common, len(wanted) - 1)


@given(
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 3)), max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 4),
)
@example([(0, 1), (1, 2), (1, 2), (2, 3)], [1, 2, 2, 3, 0], 1)
@settings(max_examples=40)
def test_positions_may_have_gaps_and_doubles(entries, wanted, min_chunk):
    entries = sorted(entries, key=lambda x: x[0])
    was = tuple(np.array(x, np.int32) for x in zip(*entries, strict=True)) or held()
    for chunks in (False, True):
        reuse = plan_reuse(was, wanted, chunks=chunks, min_chunk=min_chunk)
        check(was, wanted, reuse, min_chunk)
        at = was[0][:, None] == np.arange(reuse.n_prefix)
        assert np.all(at.sum(0) == 1)


# --- named cases ------------------------------------------------------------------------------


def test_an_identical_prompt_evaluates_its_last_token():
    reuse = plan_reuse(held(A), A)
    assert reuse.n_prefix == 39 and reuse.evaluate == ((39, 40),)
    assert reuse.reasons == (miss(39, 40, Reason.LAST),)
    assert reuse.first_difference is None and not reuse.approximate
    assert operations(reuse) == (Remove(seq_id=0, p0=39, p1=None), Evaluate(start=39, end=40))


def test_a_longer_prompt_keeps_all_and_removes_nothing():
    reuse = plan_reuse(held(A), joined(A, B), at=from_on(40))
    assert reuse.n_prefix == 40 and reuse.reasons == (miss(40, 80, Reason.NOT_HELD),)
    assert operations(reuse) == (Evaluate(start=40, end=80),)


def test_a_shorter_prompt_is_cut_back():
    reuse = plan_reuse(held(A, B), A)
    assert reuse.n_prefix == 39 and reuse.first_difference is None
    assert reuse.reasons == (miss(39, 40, Reason.LAST),)


def test_nothing_in_common_and_nothing_held():
    reuse = plan_reuse(held(A), B, chunks=True)
    assert reuse.n_prefix == 0 and reuse.first_difference == 0
    assert reuse.reasons == (miss(0, 40, Reason.DIFFERS),)
    assert operations(reuse)[0] == Remove(seq_id=0, p0=0, p1=None)
    empty = plan_reuse(held(), B)
    assert empty.reasons == (miss(0, 40, Reason.NOT_HELD),) and len(operations(empty)) == 1


def test_deleted_at_the_start():
    reuse = plan_reuse(held(A, B, C), joined(B, C, X), chunks=True)
    assert reuse.keeps == (KeptChunk(p0=40, p1=120, start=0),) and reuse.n_prefix == 0
    assert reuse.first_difference == 0 and reuse.approximate and reuse.n_exact == 0
    assert operations(reuse) == (
        Remove(seq_id=0, p0=0, p1=40),
        Shift(seq_id=0, p0=40, p1=120, d=-40),
        Evaluate(start=80, end=120),
    )


def test_deleted_in_the_middle_and_the_last_token_is_not_kept():
    reuse = plan_reuse(held(A, B, C), joined(A, C), chunks=True)
    assert reuse.n_prefix == 40 and reuse.keeps == (KeptChunk(p0=80, p1=119, start=40),)
    assert reuse.reasons == (miss(79, 80, Reason.LAST),) and reuse.n_exact == 40
    off = plan_reuse(held(A, B, C), joined(A, C))
    assert off.reasons == (miss(40, 80, Reason.OFF),) and not off.approximate


def test_inserted_in_the_middle_moves_up_and_is_not_held():
    reuse = plan_reuse(held(A, B, C), joined(A, X, B, C, [7]), chunks=True)
    assert reuse.keeps == (KeptChunk(p0=40, p1=120, start=80),)
    assert reuse.evaluate == ((40, 80), (160, 161))
    assert {m.reason for m in reuse.reasons} == {Reason.NOT_HELD}


def test_moves_down_come_before_moves_up_and_up_from_the_end():
    old = held([9], A, [8], [7] * 5, B, C, X)
    wanted = joined([6], A, B, [5] * 9, C, [4] * 3, X, [3])
    reuse = plan_reuse(old, wanted, chunks=True)
    moves = [op for op in operations(reuse) if isinstance(op, Shift)]
    assert [m.d for m in moves] == [-6, 6, 3] and len(reuse.keeps) == 4
    assert moves[1].p0 > moves[2].p0
    check(old, wanted, reuse, 32)


def test_moves_down_go_in_ascending_order():
    old = held(X, A, [8] * 9, B)
    reuse = plan_reuse(old, joined(A, B, [3]), chunks=True)
    moves = [op for op in operations(reuse) if isinstance(op, Shift)]
    # The place of B is where A was.
    assert moves == [Shift(seq_id=0, p0=40, p1=80, d=-40), Shift(seq_id=0, p0=89, p1=129, d=-49)]
    check(old, joined(A, B, [3]), reuse, 32)


def test_an_equally_long_replacement_moves_nothing_but_is_approximate():
    reuse = plan_reuse(held(A, B, C), joined(A, X, C, [1]), chunks=True)
    assert reuse.keeps == (KeptChunk(p0=80, p1=120, start=80),) and reuse.approximate
    assert not any(isinstance(op, Shift) for op in operations(reuse))
    assert reuse.reasons[0] == miss(40, 80, Reason.DIFFERS)


def test_a_short_chunk_is_named():
    wanted = joined(A, [1], B[5:20], [2])
    reuse = plan_reuse(held(A, B), wanted, chunks=True)
    assert [m.reason for m in reuse.reasons] == [Reason.DIFFERS, Reason.SHORT, Reason.DIFFERS]
    assert plan_reuse(held(A, B), wanted, chunks=True, min_chunk=8).n_reused == 40 + 15


def test_chunks_do_not_cross():
    reuse = plan_reuse(held(A, B, C), joined(A, C, B, [1]), chunks=True)
    assert len(reuse.keeps) == 1 and reuse.n_reused == 80


def test_layers_that_cannot_be_cut_back_reuse_all_or_nothing():
    wanted = joined(A, X, B)
    for chunks in (False, True):
        reuse = plan_reuse(held(A, B), wanted, chunks=chunks, at=from_on(41))
        assert reuse.n_prefix == 0 and not reuse.keeps
        assert reuse.reasons[0] == miss(0, 40, Reason.CANNOT_RESUME)
        assert operations(reuse)[0] == Remove(seq_id=0, p0=0, p1=None)
    assert plan_reuse(held(A, B), wanted, at=from_on(40)).n_prefix == 40
    # The last token is evaluated again, so an identical prompt is a cut too.
    again = plan_reuse(held(A), A, at=from_on(40))
    assert [m.reason for m in again.reasons] == [Reason.CANNOT_RESUME, Reason.LAST]


def test_a_gap_ends_the_prefix():
    pos, ids = held(A, B)
    pos = np.where(pos < 40, pos, pos + 5).astype(np.int32)
    reuse = plan_reuse((pos, ids), joined(A, B, [1]))
    assert reuse.n_prefix == 40 and reuse.reasons[0] == miss(40, 80, Reason.MOVED)
    moved = plan_reuse((pos, ids), joined(A, B, [1]), chunks=True)
    assert moved.keeps == (KeptChunk(p0=45, p1=85, start=40),) and moved.approximate


def test_a_position_held_twice_is_not_believed():
    pos, ids = held(A)
    twice = np.sort(np.append(pos, np.int32(10)))
    reuse = plan_reuse((twice, np.insert(ids, 11, ids[10])), A)
    assert reuse.n_prefix == 10


def test_text_after_a_shift_is_other_text_under_another_prefix():
    # A B C with B dropped: positions say 0 to 79, and C was computed after A B.
    shifted = held(A, C)
    original = plan_reuse(shifted, joined(A, B, C), n_exact=40)
    assert original.n_prefix == 40 and original.first_difference == 40
    same = plan_reuse(shifted, joined(A, C, X), n_exact=40)
    assert same.n_prefix == 40 and not same.approximate and same.first_difference is None
    assert same.reasons[0] == miss(40, 80, Reason.OTHER_PREFIX)
    asked = plan_reuse(shifted, joined(A, C, X), n_exact=40, chunks=True)
    assert asked.n_prefix == 80 and asked.approximate and asked.n_exact == 40


def test_repeated_text_is_matched_at_its_ends():
    line = list(range(50))
    reuse = plan_reuse(held([1], line * 20), [2, *line * 19, 3], chunks=True)
    assert reuse.n_reused == 950


def test_a_long_text_is_compared_in_good_time():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 50_000, 60_000).astype(np.int32)
    keep = np.ones(len(old), bool)
    keep[rng.integers(0, len(old), 60)] = False
    found = diff.runs(old, old[keep], 32)
    assert sum(r.n for r in found) > 58_000
    # Text that repeats itself has no anchors, and must not become quadratic for it.
    assert diff.runs(old[:100].repeat(600), old[50:150].repeat(500), 32) is not None


@pytest.mark.parametrize(
    "error, kwargs",
    [
        (BadToken, {"wanted": []}),
        (BadRange, {"held": (held(A)[0][::-1], held(A)[1])}),
        (BadRange, {"held": held(A, start=-1)}),
        (UsageError, {"min_chunk": 0}),
        (UsageError, {"n_exact": -1}),
    ],
)
def test_what_cannot_be_planned_is_refused(error, kwargs):
    with pytest.raises(error) as e:
        plan_reuse(**{"held": held(A), "wanted": [1], **kwargs})
    assert "\n" not in str(e.value)


# Rows of the toy do not depend on other tokens, so that chunks are exact as well.
FIRST = list(range(1, 25))
DELETIONS = [*FIRST[:4], *FIRST[8:12], *FIRST[14:20], 30, 31]


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
@pytest.mark.parametrize("masks", [(), (MaskSpec(kind="window", size=4),)])
@pytest.mark.parametrize(
    "wanted, chunks, n_reused",
    [
        ([1, 2, 3, 4, 9, 8], False, 4),
        ([*FIRST, 30], False, 24),
        (FIRST, False, 23),
        (DELETIONS, True, 14),
    ],
)
def test_a_runtime_carries_out_a_plan(wanted, chunks, n_reused, masks, rope):
    model, config = RowModel(masks=masks), CacheConfig(n_ctx=64, rope=rope, swa_full=True)
    runtime = Runtime(model, config)
    runtime.prefill(FIRST)
    at = runtime.resume_positions()
    reuse = plan_reuse(runtime.token_history(), wanted, chunks=chunks, min_chunk=3, at=at)
    assert reuse.n_reused == n_reused and reuse.approximate == chunks
    *changes, last = operations(reuse)
    for op in changes:
        if isinstance(op, Remove):
            runtime.seq_rm(0, op.p0, op.p1)
        else:
            runtime.seq_add(0, op.p0, op.p1, op.d)
    logits = runtime.append(wanted[last.start : last.end])
    fresh = Runtime(model, config).prefill(wanted)
    np.testing.assert_allclose(logits[0], fresh, rtol=0, atol=1e-5)
    pos, ids = runtime.token_history()
    assert pos.tolist() == list(range(len(wanted))) and ids.tolist() == wanted


@pytest.mark.slow
def test_layers_that_have_forgotten_are_not_asked_to_resume():
    model = RowModel(masks=(MaskSpec(kind="window", size=4),))
    runtime = Runtime(model, CacheConfig(n_ctx=64, n_ubatch=4, block_size=8))
    runtime.prefill(FIRST)
    at = runtime.resume_positions()
    for n in range(1, len(FIRST) + 1):
        wanted = [*FIRST[:n], 30]
        reuse = plan_reuse(runtime.token_history(), wanted, at=at)
        # What the plan keeps is all that the runtime would let it keep.
        assert (reuse.n_prefix == n) == runtime.can_remove(0, n)
        assert reuse.n_prefix in (0, n)
    assert 0 < at.earliest <= len(FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
def test_a_runtime_fills_what_chunks_leave_open(rope):
    model = RowModel(n_vocab=400)
    runtime = Runtime(model, CacheConfig(n_ctx=256, n_ubatch=16, block_size=32, rope=rope))
    runtime.prefill(joined(A, B, C))
    wanted = joined(A, X[:7], B[5:], X[9:30], C)
    plan = plan_reuse(runtime.token_history(0), wanted, chunks=True)
    assert plan.approximate and plan.n_reused == 40 + 35 + 39
    for op in operations(plan):
        if isinstance(op, Remove):
            runtime.seq_rm(0, op.p0, op.p1)
        elif isinstance(op, Shift):
            runtime.seq_add(0, op.p0, op.p1, op.d)
        elif op.end < len(wanted):
            runtime.fill(wanted[op.start : op.end], 0, op.start)
        else:
            found = runtime.append(wanted[op.start :], 0)
    assert runtime.token_history(0)[1].tolist() == wanted and runtime.n_exact(0) == 47
    fresh = Runtime(model, runtime.config)
    np.testing.assert_allclose(found[0], fresh.prefill(wanted), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masks", "pos", "message"),
    [
        ((), 3, "5 are held"),
        ((), -1, "are not empty"),
        ((MaskSpec(kind="window", size=4),), 60, "take tokens in at the end"),
    ],
)
def test_what_cannot_be_filled_is_refused(masks, pos, message):
    model = RowModel(n_vocab=32, masks=masks)
    runtime = Runtime(model, CacheConfig(n_ctx=64, n_ubatch=8, block_size=8))
    runtime.prefill(list(range(20)))
    with pytest.raises((BadRange, CannotRewind), match=message):
        runtime.fill([1, 2, 3, 4, 5], 0, pos)
    assert runtime.token_history(0)[1].tolist() == list(range(20))


@pytest.mark.slow
def test_what_follows_a_checkpoint_is_evaluated_and_what_lies_before_it_is_not():
    at = ResumePositions(gaps=((1, 110),), checkpoints=(16, 32, 96))
    reuse = plan_reuse(held(A, B, C), joined(A, B), at=at)
    assert reuse.n_prefix == 32
    assert reuse.reasons == (miss(32, 79, Reason.AFTER_RESUMED), miss(79, 80, Reason.LAST))
    assert operations(reuse) == (Remove(seq_id=0, p0=32), Evaluate(start=32, end=80))
    none = plan_reuse(held(A, B, C), joined(A[:10], X), at=at)
    assert none.n_prefix == 0 and none.reasons[0] == miss(0, 10, Reason.CANNOT_RESUME)

"""Logits of the newest token are there when they are wanted; a generation goes on where it was."""

import itertools

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, ContextShift, MaskSpec, Runtime, Sampling, SelfExtend, errors
from kvrt import cells as kc
from kvrt.cache import schedules
from kvrt.runtime.generate import After
from tests.oracle import Oracle, rope
from tests.toys import HybridLm, RowModel, ToyLm, allclose, tables

pytestmark = pytest.mark.usefixtures("numpy_device")

TOY = ToyLm(n_layers=1)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SEEDED = Sampling(temp=0.9, top_k=30, repeat_penalty=1.3, repeat_last_n=6, seed=7)


def build(model=None, policy=None, **how):
    config = CacheConfig(**(dict(n_ctx=32, n_seq_max=3, block_size=8, n_ubatch=8) | how))
    return Runtime(model or RowModel(n_vocab=64), config, policy=policy)


def ids(tokens):
    return [t.id for t in tokens]


def state_of(at):
    """Every byte on either side; what awaits its rotation comes first."""
    device = [np.array(x).tobytes() for x in jax.tree.leaves(at.cache)]
    return [x.tobytes() for x in jax.tree.leaves(at.cells)] + device


def by_oracle(at, model, seq):
    """Logits of a sequence's newest token over what it holds, by position."""
    q, k, v = tables(model)
    pos, tokens = at.token_history(seq)
    oracle, spec = Oracle(), model.group.rope
    oracle.append(seq, pos, [(k[t], v[t]) for t in tokens])

    def turn(x, pos):
        return rope(x, pos, n_rot=spec.n_rot, base=spec.base)

    def seen(mask):
        end, scale = [int(pos[-1])], model.group.head_dim**-0.5
        return oracle.attend(seq, q[tokens[-1:]], end, mask, scale, turn)

    return sum(seen(g.mask) for g in model.groups).reshape(1, -1)


CHANGES = {
    "nothing": lambda r: None,
    "the middle removed": lambda r: r.seq_rm(0, 2, 5),
    "the end removed": lambda r: r.seq_rm(0, 5),
    "all but one removed": lambda r: r.seq_rm(0, 1),
    "the first removed": lambda r: r.seq_rm(0, 0, 7),
    "a gap closed": lambda r: (r.seq_rm(0, 2, 5), r.seq_add(0, 5, None, -3)),
    "moved": lambda r: r.seq_add(0, 0, None, 9),
    "divided": lambda r: r.seq_div(0, 0, 6, 2),
    "a copy": lambda r: (r.seq_cp(0, 1), r.seq_rm(0), r.seq_cp(1, 0)),
    "a copy that others keep": lambda r: (r.seq_cp(0, 1), r.seq_rm(0, 7), r.seq_cp(0, 2, 0, 3)),
    "decoded, then cut": lambda r: (r.decode({0: 5, 1: 6}), r.seq_rm(0, 3, 4)),
    "generated": lambda r: (list(r.generate(4)), r.seq_rm(0, 0, 1)),
    "filled": lambda r: (r.seq_rm(0, 2, 4), r.fill([7, 8], 0, 2)),
    "packed": lambda r: (r.seq_rm(0, 2, 4), r.defrag(by_sequence=True)),
    "restored": lambda r: (r.restore(r.snapshot(), {0: 2}), r.restore(r.snapshot(), {2: 0})),
    "in blocks": lambda r: (r.to_blocks(0), r.seq_rm(0, 2, 4)),
    "a full cache": lambda r: (r.append([1] * 24, 1), r.seq_cp(0, 2), r.last_logits(0)),
}


@pytest.mark.parametrize("mode", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_logits_after_every_change_are_those_of_the_oracle(mode):
    model = RowModel(n_vocab=64)
    at = build(model, rope=mode)
    for name, change in CHANGES.items():
        at.clear()
        at.append(PROMPT)
        change(at)
        at.flush()
        before = state_of(at)
        found = at.last_logits(0)
        assert state_of(at) == before, name
        allclose(found, by_oracle(at, model, 0), 1e-4)
        # What is drawn from them is what a runtime that read the same would draw.
        assert ids(at.generate(1)) == [int(np.argmax(found))], name


@pytest.mark.slow
def test_a_whole_change_equals_a_fresh_evaluation_of_many_layers():
    at = build(ToyLm())
    at.append(PROMPT)
    list(at.generate(5))
    at.seq_rm(0, 9)
    fresh = build(ToyLm())
    fresh.append(at.token_history()[1].tolist())
    allclose(at.last_logits(0), fresh.last_logits(0))
    assert ids(at.generate(6)) == ids(fresh.generate(6))


WINDOWS = dict(model=RowModel(n_vocab=64, masks=(MaskSpec(kind="window", size=3),)), n_ubatch=4)
RECURRENT = dict(model=HybridLm(), n_rs_seq=2)
KINDS = {
    "windows": WINDOWS,
    "int8 keys": dict(type_k="int8", type_v="int8"),
    "read, paper": dict(
        rope="read", self_extend=SelfExtend(ga_n=2, ga_w=4, kind="paper"), model=ToyLm()
    ),
    "write, paper": dict(self_extend=SelfExtend(ga_n=2, ga_w=4, kind="paper"), model=ToyLm()),
    "extended": dict(self_extend=SelfExtend(ga_n=2, ga_w=4), model=ToyLm()),
    "by channel": dict(
        type_k="kivi4", n_ctx=64, block_size=32, model=RowModel(n_vocab=64, head_dim=32)
    ),
    "recurrent": RECURRENT,
}


QUICK = ("windows", "recurrent")


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_a_cut_and_the_same_token_again_give_the_same_logits(kind):
    """Against `append`: take the newest token out and evaluate it, in a cache of its own."""
    both = build(**KINDS[kind]), build(**KINDS[kind])
    for at in both:
        at.append(PROMPT)
        at.append([7, 8, 9], out_ids=[0])
    found, (pos, tokens) = both[0].last_logits(0), both[1].token_history()
    both[1].seq_rm(0, int(pos[-1]))
    allclose(found, both[1].append([int(tokens[-1])]), 1e-4)
    assert ids(both[0].generate(4)) == ids(both[1].generate(4))


@pytest.mark.parametrize("how", [WINDOWS, RECURRENT], ids=QUICK)
def test_what_cannot_be_taken_back_is_refused_and_one_token_more_helps(how):
    at = build(**how)
    at.append([i % 32 for i in range(28)], out_ids=[0])
    # As far back as it goes: the token there saw one position more than the next one will.
    end = at.resume_positions().earliest
    assert end > 0
    at.seq_rm(0, end)
    before = state_of(at), at.stats().cells_used
    with pytest.raises(errors.CannotRewind, match=r"^sequence 0 has no logits .* append one more"):
        at.generate(2)
    assert (state_of(at), at.stats().cells_used) == before
    at.append([1])
    assert len(list(at.generate(2))) == 2
    # Going on where it stopped needs no logits, so nothing has to be taken back.
    assert len(list(at.generate(2))) == 2


def test_tokens_that_share_the_last_position_are_refused():
    at = build()
    at.append(PROMPT)
    at.seq_div(0, 0, None, 4)
    with pytest.raises(errors.BadToken, match="4 of its tokens stand at its end, position 1"):
        at.last_logits(0)


# --- one generation after another --------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "sampling"),
    [
        pytest.param(1, Sampling(), marks=pytest.mark.slow),
        (1, SEEDED),
        (4, Sampling()),
        pytest.param(4, SEEDED, marks=pytest.mark.slow),
    ],
)
def test_two_generations_are_one_of_both_lengths(sampling, stride):
    def start():
        at = build(TOY)
        at.append(PROMPT)
        return at

    whole = start()
    expected = ids(whole.generate(24, sampling=sampling, recent=PROMPT, stride=stride))
    for cuts in ((12, 12), (1, 1, 22), (5, 0, 19)):
        at, found, recent = start(), [], PROMPT
        for n in cuts:
            found += ids(at.generate(n, sampling=sampling, recent=recent, stride=stride))
            recent = ()
        assert found == expected, cuts
        assert at.cells.pos.tolist() == whole.cells.pos.tolist()
    # `after` says the same by hand, and is believed where it says something else.
    at = start()
    begun = ids(at.generate(10, sampling=sampling, recent=PROMPT))
    after = After(token=begun[-1], n_sampled=10)
    rest = at.generate(14, sampling=sampling, recent=[*PROMPT, *begun], after=after)
    assert begun + ids(rest) == expected


@pytest.mark.parametrize("mode", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_generations_go_on_over_context_shifts(mode):
    def start():
        at = build(TOY, policy=ContextShift(n_keep=2), rope=mode)
        at.append(PROMPT)
        return at

    whole, parts = start(), start()
    expected = ids(whole.generate(60))
    assert [t for n in (17, 1, 30, 12) for t in ids(parts.generate(n))] == expected
    assert parts.stats().drops == whole.stats().drops
    # Room made between two of them moves the end, and what goes on there goes on.
    at = start()
    begun = ids(itertools.islice(at.generate(16, stride=4), 14))
    schedules.make_room(at._cache, {0: 9})
    assert at.stats().n_dropped and begun[-1] != at.token_history()[1][-1]
    rest = ids(at.generate(3))
    assert at.token_history()[1].tolist()[-5:] == [*begun[-3:], *rest[:2]]


@pytest.mark.parametrize("n_taken", [1, 2, 3, 6])
def test_a_generation_left_within_a_run_goes_on_with_the_next_token(n_taken):
    def start():
        at = build(TOY)
        at.append(PROMPT)
        return at

    expected = ids(start().generate(12))
    at = start()
    begun = ids(itertools.islice(at.generate(12, stride=4), n_taken))
    assert begun + ids(at.generate(12 - n_taken)) == expected


def test_what_a_run_of_a_recurrent_layer_took_in_cannot_be_given_back():
    at = build(**RECURRENT)
    at.append(PROMPT)
    next(tokens := at.generate(9, stride=4))
    next(tokens)
    with pytest.raises(errors.CannotRewind, match=r"left within a run .* use stride=1"):
        at.generate(1)
    list(tokens)
    assert len(ids(at.generate(2))) == 2


def test_a_changed_sequence_is_drawn_from_anew():
    """Whatever changes a sequence, its next generation starts from what it holds."""
    for change in (
        lambda r: r.append([5]),
        lambda r: r.decode({0: 5}),
        lambda r: r.seq_rm(0, 1, 2),
        lambda r: r.restore(r.snapshot()),
        lambda r: (r.seq_keep(1), r.append(PROMPT)),
        lambda r: (r.clear(), r.append(PROMPT)),
    ):
        at = build(TOY)
        at.append(PROMPT)
        list(at.generate(4))
        change(at)
        found = int(np.argmax(at.last_logits(0)))
        assert ids(at.generate(1)) == [found]


def test_other_sequences_do_not_disturb_a_generation():
    alone, at = build(TOY), build(TOY)
    alone.append(PROMPT)
    expected = ids(alone.generate(8))
    at.append(PROMPT)
    found = ids(at.generate(4))
    at.append([9, 9], 1)
    at.seq_cp(0, 2)
    at.seq_rm(1)
    assert found + ids(at.generate(4)) == expected
    # The copy lacks the token that was drawn last: it draws it again.
    assert ids(at.generate(5, 2)) == expected[3:]
    assert kc.n_used(at.cells) == len(PROMPT) + 3 + 8


def test_stale_logits_of_an_emptied_sequence_are_not_those_of_the_next():
    at = build()
    at.append(PROMPT)
    at.seq_keep(1)
    at.append(PROMPT[::-1], out_ids=[0])
    allclose(at.last_logits(0), by_oracle(at, RowModel(n_vocab=64), 0), 1e-4)

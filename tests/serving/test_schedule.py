"""The scheduler, case by case: who runs, who waits, who is preempted, and what is computed once."""

import pytest
from plainspace import PlainSpace, Served, alone, ids

from kvrt.errors import BadConfig, BadRequest
from kvrt.options.sampling import Sampling
from kvrt.options.serving import Rules
from kvrt.serving import request as requests
from kvrt.serving.request import Request
from kvrt.serving.scheduling.scheduler import Scheduler


def ask(name, n_prompt=4, n_predict=4, **rest) -> Request:
    tokens = rest.pop("tokens", tuple((len(name) * 7 + i) % 90 for i in range(n_prompt)))
    return Request(id=name, tokens=tokens, n_predict=n_predict, **rest)


def served(n_seq_max=4, n_blocks=64, *, finds=False, offloads=False, **rules) -> Served:
    space = PlainSpace(n_seq_max, n_blocks, finds=finds, offloads=offloads)
    return Served(space, Rules(**{"n_batch": 16, **rules}))


def prompts(plan) -> list[tuple[str, int, int]]:
    return [(s.request.id, start, n) for s, start, n in plan.prompts]


def test_those_who_run_come_first_and_share_a_budget():
    s = served()
    s.add(ask("a", 10))
    s.add(ask("b", 30))
    first, second, third = s.step(), s.step(), s.step()
    assert prompts(first) == [("a", 0, 10), ("b", 0, 6)]
    assert (ids(second.decode), prompts(second)) == (["a"], [("b", 6, 15)])
    assert (ids(third.decode), prompts(third)) == (["a"], [("b", 21, 9)])
    s.run(10)
    assert s.ended["a", 0].output == alone(ask("a", 10), 0)


def test_a_prompt_of_which_one_token_is_missing_decodes():
    s = served(finds=True)
    s.add(ask("a", tokens=tuple(range(8))))
    s.run(10)
    s.add(ask("b", tokens=tuple(range(9))))
    plan = s.step()
    assert (ids(plan.decode), plan.prompts) == (["b"], [])
    assert plan.admitted[0].n_cached == 8


def test_a_sample_whose_last_token_is_awaited_decodes_no_more():
    s = served()
    s.add(ask("short", n_predict=2))
    s.add(ask("long", n_predict=3))
    for names in (["short", "long"], ["short", "long"], ["long"]):
        plan = s.scheduler.plan()
        assert ids(plan.ending) == names
        s.scheduler.ran(plan)
        for state in s.scheduler.running:
            state.tokens.append(0)


def test_no_prompt_takes_more_than_its_limit_while_others_want_some():
    s = served(n_seq_max=3, n_chunk=6, n_blocks=400)
    s.add(ask("long", 1000))
    assert prompts(s.step()) == [("long", 0, 16)]  # nobody else wants the rest
    s.add(ask("b", 8))
    s.add(ask("c", 4))
    assert prompts(s.step()) == [("long", 16, 6), ("b", 0, 6), ("c", 0, 4)]
    plan = s.step()
    assert prompts(plan)[0][2] == 13 and ids(plan.decode) == ["c"]  # b ends with 2
    s.run(200)


def test_short_requests_end_while_a_long_prompt_is_read():
    s = served(n_seq_max=3, n_chunk=8, n_blocks=2000)
    s.add(ask("long", 5000))
    for i in range(20):
        s.add(ask(f"short{i}", 8))
    s.run(1000)
    assert list(s.ended)[-1] == ("long", 0)
    # A budget without a limit a request: nobody gets anything until the prompt is read.
    s = served(n_seq_max=3, n_blocks=2000)
    s.add(ask("long", 5000))
    s.add(ask("short", 8))
    s.run(1000)
    assert sum(bool(p.decode) for p in s.plans[: 5000 // 16]) == 0


def test_the_last_one_admitted_is_preempted_and_first_to_resume():
    s = served(n_seq_max=3, n_blocks=8, n_batch=24)
    for name in "abc":
        s.add(ask(name, 7, 9))
    s.step()
    s.step()  # 8 tokens each fill 6 of 8 blocks
    plan = s.step()
    assert (ids(plan.preempted), ids(plan.decode)) == (["c"], ["a", "b"])
    assert s.scheduler.running[-1].request.id == "b"
    s.add(ask("d", 1, 1))
    while not plan.admitted:
        plan = s.step()
    assert ids(plan.admitted)[0] == "c"
    s.run(60)
    assert {k: v.output for k, v in s.ended.items()} == {
        (n, 0): alone(ask(n, *sizes), 0)
        for n, sizes in {"a": (7, 9), "b": (7, 9), "c": (7, 9), "d": (1, 1)}.items()
    }
    assert s.ended["c", 0].n_preempted >= 1 and s.ended["a", 0].n_preempted == 0


def test_nobody_is_admitted_in_a_step_that_preempts():
    s = served(n_seq_max=3, n_blocks=5, order="priority")
    s.add(ask("a", 7, 9))
    s.add(ask("b", 11, 5, priority=1))
    s.step()
    s.step()
    s.add(ask("c", 1, 1))  # better than b, and small enough for what b leaves
    first, second = s.step(), s.step()
    assert (ids(first.preempted), first.admitted, first.n_left) == (["b"], [], 15)
    assert ids(second.admitted)[0] == "c"
    s.run(60)


def test_a_prompt_for_which_nothing_is_left_sits_a_step_out():
    s = served(n_seq_max=7, n_batch=12, n_chunk=4)
    s.add(ask("four", 1, 3, n=4))
    for name in "abc":
        s.add(ask(name, 20))
    assert prompts(s.step()) == [("a", 0, 4), ("b", 0, 4), ("c", 0, 3)]
    plan = s.step()
    assert (len(plan.decode), prompts(plan)) == (4, [("a", 4, 4), ("b", 4, 4)])
    s.run(60)


def test_by_priority_the_worst_one_is_preempted():
    s = served(n_seq_max=3, n_blocks=6, order="priority")
    for name, priority in (("a", 5), ("b", 9), ("c", 1)):
        s.add(ask(name, 7, 9, priority=priority))
    s.add(ask("first", 1, 1, priority=-3))
    assert ids(s.step().admitted) == ["first", "c", "a"]
    assert ids(s.step().admitted) == ["b"]
    taken = []
    while s.scheduler.live:
        taken += ids(s.step().preempted)
    assert taken[0] == "b" and "c" not in taken


def test_a_sequence_that_is_offloaded_is_not_computed_again():
    outputs, computed = [], []
    for preempt in ("recompute", "swap"):
        s = served(n_seq_max=3, n_blocks=6, offloads=True, preempt=preempt)
        for name in "abc":
            s.add(ask(name, 7, 9))
        s.run(80)
        outputs.append({k: v.output for k, v in s.ended.items()})
        computed.append(s.n_computed)
        assert any(p.preempted for p in s.plans)
        assert any(p.offloaded for p in s.plans) == (preempt == "swap")
    assert outputs[0] == outputs[1]
    assert computed[1] == 3 * (7 + 9 - 1) < computed[0]


@pytest.mark.parametrize(
    ("admit", "asked"), [("chunk", [None, None]), ("text", [10, 5]), ("whole", [29, 24])]
)
def test_what_has_to_fit(admit, asked):
    s = served(admit=admit)
    s.add(ask("a", 10, 20))
    s.add(ask("b", 5, 20))
    s.step()
    assert s.space.asked == asked


def test_by_the_whole_nobody_is_preempted_who_would_not_have_to_be():
    # 8 blocks of 4: two requests of at most 16 tokens fit, a third one waits.
    s = served(n_seq_max=3, n_blocks=8, admit="whole")
    for name in "abc":
        s.add(ask(name, 8, 9))
    s.run(60)
    assert not any(p.preempted for p in s.plans)


def test_one_that_comes_back_asks_for_more_each_time():
    s = served(n_seq_max=2, n_blocks=40)
    s.add(ask("a", 40, 100))
    s.add(ask("b", 40, 100))
    s.run(400)
    b = s.ended["b", 0]
    # 100 tokens sampled of both do not fit; without a margin b would be computed at every block.
    assert b.n_preempted == 1 and s.n_computed < 400


def test_one_that_can_never_fit_is_refused_at_once():
    s = served(n_blocks=4)
    with pytest.raises(BadRequest, match="room for 17 tokens, the cache holds 16") as error:
        s.add(ask("a", 10, 8))
    assert "\n" not in str(error.value) and not s.scheduler.live
    s.add(ask("a", 10, 7))
    s.run(20)


class Refusing(PlainSpace):
    """Promises room that is not there: for nobody, or for no more than the first block."""

    def admit(self, state, n_tokens, whole):
        return None if self.n_free < self.n_blocks - 1 else super().admit(state, n_tokens, whole)

    def grow(self, state, n_tokens):
        return n_tokens <= self.held[state.seq_id] * self.block


@pytest.mark.parametrize("n_predict", [2, 20])
def test_one_for_whom_there_is_no_room_although_it_is_alone_ends_with_an_error(n_predict):
    space = Refusing(2, 64)
    if n_predict == 2:
        space.held[1] = 5  # held by nobody
    s = Served(space, Rules(n_batch=16))
    (state,) = requests.samples_of(ask("a", 8, n_predict))
    s._check = lambda plan: None
    s.scheduler.add(state)
    for _ in range(60):
        s.step()
    assert not s.scheduler.live and state.finish_reason == "error"
    assert state.error is not None and "no room" in state.error and "\n" not in state.error
    s.add(ask("b", 1, 1))  # others go on
    space.held.clear()
    s.run(5)
    assert s.ended["b", 0].finish_reason == "length"


def test_samples_share_one_prompt():
    s = served(n_seq_max=4)
    request = ask("a", 10, 5, n=3, sampling=Sampling(seed=5))
    s.add(request)
    plan = s.step()
    assert prompts(plan) == [("a", 0, 10)]
    assert [(src.sample, dst.sample) for src, dst in plan.forks] == [(0, 1), (0, 2)]
    s.run(10)
    assert [s.ended["a", i].output for i in range(3)] == [alone(request, i) for i in range(3)]
    assert len({tuple(alone(request, i)) for i in range(3)}) == 3
    assert s.n_computed == 10 + 3 * 4
    assert [s.ended["a", i].n_cached for i in range(3)] == [0, 10, 10]


def test_samples_without_room_hit_the_prompt_later():
    s = served(n_seq_max=2, finds=True)
    request = ask("a", 10, 5, n=4)
    s.add(request)
    plan = s.step()
    assert len(plan.forks) == 1
    s.run(40)
    assert [s.ended["a", i].output for i in range(4)] == [alone(request, i) for i in range(4)]
    assert [s.ended["a", i].n_cached for i in range(4)] == [0, 10, 8, 8]


def test_a_fork_for_which_there_are_no_blocks_waits_with_the_token_it_drew():
    s = served(n_seq_max=2, n_blocks=4, finds=True)
    request = ask("a", 11, 2, n=2)
    s.add(request)
    s.step()
    assert [x.sample for x in s.scheduler.running] == [0] and s.scheduler.n_waiting == 1
    s.run(10)
    assert [s.ended["a", i].output for i in range(2)] == [alone(request, i) for i in range(2)]


def test_the_next_sample_leads_when_the_first_ends_early():
    s = served(n_seq_max=2)
    request = ask("a", 30, 3, n=3)
    s.add(request)
    s.step()
    s.scheduler.finish(s.scheduler.running[0], "error")
    s.run(20)
    assert [s.ended["a", i].output for i in (1, 2)] == [alone(request, i) for i in (1, 2)]


def test_a_cancelled_request_leaves_nothing():
    s = served(n_seq_max=2)
    s.add(ask("run", 10, 9, n=2))
    s.add(ask("wait", 10, 9))
    s.step()
    s.add(ask("follow", 10, 9, n=3))
    for name, n in (("run", 2), ("follow", 3), ("wait", 1)):
        assert len(s.scheduler.cancel(name)) == n
        with pytest.raises(BadRequest, match="is not being served"):
            s.scheduler.cancel(name)
    assert not s.scheduler.live and not s.space.held and s.scheduler.n_waiting == 0
    assert s.step().n_tokens == 0


def test_a_request_that_is_cancelled_while_its_step_runs_is_out():
    s = served(n_seq_max=3)
    s.add(ask("a", 4, 9, n=2))
    s.add(ask("b", 4, 9))
    plan = s.scheduler.plan()
    s.scheduler.cancel("a")
    s.scheduler.ran(plan)
    assert ids(s.scheduler.running) == ["b"] and list(s.space.held) == [1]


def test_an_id_is_taken_while_it_is_served():
    s = served()
    s.add(ask("a"))
    with pytest.raises(BadRequest, match="'a' is being served already"):
        s.add(ask("a", 7))
    s.run(10)
    s.add(ask("a", 7))
    s.run(10)


def test_a_step_must_hold_a_token_of_every_row():
    with pytest.raises(BadConfig, match="n_batch is 3, below the 4 sequences"):
        Scheduler(PlainSpace(4, 8), Rules(n_batch=3))
    for name in ("n_batch", "n_chunk", "n_wait", "n_alike"):
        with pytest.raises(BadConfig, match=f"{name} is 0"):
            Rules(**{"n_batch": 8, name: 0})


class Fetching(PlainSpace):
    """Tells of one request that its tokens are on their way."""

    away = "a"

    def find_hit(self, state):
        return None if state.request.id == self.away else super().find_hit(state)


def test_one_that_waits_for_a_tier_lets_others_pass():
    space = Fetching(2, 64)
    s = Served(space, Rules(n_batch=16))
    s.add(ask("a"))
    assert s.step().n_tokens == 0
    s.add(ask("b"))
    assert ids(s.step().admitted) == ["b"]
    space.away = ""
    assert ids(s.step().admitted) == ["a"]


class Damaged(PlainSpace):
    """Admits with less than the hit was."""

    def admit(self, state, n_tokens, whole):
        found = super().admit(state, n_tokens, whole)
        return None if found is None else found // 2 // self.block * self.block


def test_what_turns_out_to_be_damaged_is_computed():
    s = Served(Damaged(2, 64, finds=True), Rules(n_batch=16))
    s.add(ask("a", tokens=tuple(range(30))))
    s.run(10)
    s.add(ask("b", tokens=tuple(range(30))))
    assert prompts(s.step()) == [("b", 12, 16)]
    s.run(10)
    assert s.ended["b", 0].output == s.ended["a", 0].output


class Cutting(PlainSpace):
    """Keeps something at multiples of 8 alone."""

    def chunk(self, state, start, n):
        end = (start + n) // 8 * 8
        return n if start + n == len(state.tokens) or end <= start else end - start


def test_chunks_end_where_the_cache_wants_them_to():
    s = Served(Cutting(2, 64), Rules(n_batch=12, n_chunk=10))
    s.add(ask("a", 30))
    s.add(ask("b", 5))
    assert [prompts(s.step()) for _ in range(3)] == [
        [("a", 0, 8), ("b", 0, 4)],
        [("a", 8, 8)],
        [("a", 16, 8)],
    ]

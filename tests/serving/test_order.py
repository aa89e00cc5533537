"""Who is admitted first: by arrival, by priority with a bound, and shared prefixes together."""

import pytest
from plainspace import PlainSpace, Served, ids

from kvrt.options.serving import Rules
from kvrt.serving.request import Request

pytestmark = pytest.mark.usefixtures("numpy_device")


def ask(name, tokens, n_predict=2, **rest) -> Request:
    return Request(id=name, tokens=tuple(tokens), n_predict=n_predict, **rest)


def served(n_seq_max=1, *, finds=False, **rules) -> Served:
    return Served(PlainSpace(n_seq_max, 256, finds=finds), Rules(**{"n_batch": 64, **rules}))


def admitted(s: Served, n_steps: int = 200) -> list[str]:
    """The ids of those admitted until all have ended, in order."""
    s.run(n_steps)
    return [name for plan in s.plans for name in ids(plan.admitted)]


def test_by_arrival():
    s = served()
    for name in "dbca":
        s.add(ask(name, [1, 2]))
    assert admitted(s) == list("dbca")


def test_by_priority_then_by_arrival():
    s = served(order="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -2)):
        s.add(ask(name, [1, 2], priority=priority))
    assert admitted(s) == ["d", "b", "a", "c"]


def waits(n_wait: int | None, n_steps: int = 400) -> int | None:
    """Steps until a request of priority 3 gets in while one of priority 0 comes at each step."""
    s = served(order="priority", n_wait=n_wait)
    s.add(ask("low", [1, 2], priority=3))
    s.add(ask("first", [1, 2]))
    for i in range(n_steps):
        if "low" in ids(s.step().admitted):
            return i
        s.add(ask(f"high{i}", [1, 2]))
    return None


def test_a_low_priority_waits_for_a_bounded_time():
    # Nobody came in an earlier step, and the one place comes free at every second step.
    assert waits(None) is None
    assert [waits(n) for n in (1, 3, 30)] == [2, 4, 30]
    # Whatever its priority is; by default within 400 steps.
    assert Rules(n_batch=1).n_wait == 256 and waits(Rules(n_batch=1).n_wait) in range(256, 256 + 3)


@pytest.mark.parametrize("n_wait", [16, 64])
def test_each_low_priority_starts_in_time_under_more_than_can_be_served(n_wait):
    s = served(4, order="priority", n_wait=n_wait)
    came, waited = {}, {}
    for i in range(400):
        # Four places of four steps each serve one request a step: the queue never gets shorter.
        for j in range(1 if i else 8):
            s.add(ask(f"high{i}.{j}", [1, 2], 4, priority=-i))
        if i % 20 == 0 and i <= 300:
            s.add(ask(f"low{i}", [1, 2], 4, priority=i * 1000))
            came[f"low{i}"] = i
        waited |= {name: i - came[name] for name in ids(s.step().admitted) if name in came}
    assert waited.keys() == came.keys()
    # Once overdue it waits for those that came before it, eight of the first, and a free place.
    assert n_wait <= max(waited.values()) <= n_wait + 8 + 4


def test_who_is_overdue_together_goes_by_step_and_then_by_priority():
    s = served(order="priority", n_wait=2)
    s.add(ask("runs", [1, 2], 9))
    s.step()
    for name, priority in (("a", 5), ("b", 3)):
        s.add(ask(name, [1, 2], 1, priority=priority))
    s.step()
    s.add(ask("c", [1, 2], 1))
    assert admitted(s) == ["runs", "b", "a", "c"]


def test_who_is_overdue_keeps_its_row():
    # Ten blocks of four tokens: both run until there is no room for both texts.
    victims = {}
    for n_wait in (None, 3):
        s = Served(PlainSpace(2, 10), Rules(n_batch=24, order="priority", n_wait=n_wait))
        s.add(ask("low", [1] * 7, 20, priority=1))
        for _ in range(3):
            s.step()
        s.add(ask("high", [2] * 7, 20))
        while not (plan := s.step()).preempted:
            pass
        victims[n_wait] = ids(plan.preempted)
        s.run(100)
    assert victims == {None: ["low"], 3: ["high"]}


def test_those_who_begin_alike_go_together():
    s = served(by_prefix=True, n_alike=2)
    texts = {"a": [1, 1, 5], "b": [2, 2, 5], "c": [1, 1, 3], "d": [2, 2, 4], "e": [1, 1, 3, 9]}
    for name, tokens in texts.items():
        s.add(ask(name, tokens))
    # A depth-first walk over the first one's tree, then over the next one's.
    assert admitted(s) == ["c", "e", "a", "d", "b"]


def test_other_salts_and_priorities_are_other_groups():
    s = served(by_prefix=True, n_alike=2, order="priority", n_wait=None)
    s.add(ask("a", [1, 1, 5], priority=1))
    s.add(ask("b", [1, 1, 4], priority=2))
    s.add(ask("c", [1, 1, 3], priority=1, salt=b"x"))
    s.add(ask("d", [1, 1, 2], priority=1))
    assert admitted(s) == ["d", "a", "c", "b"]


def test_a_group_that_never_ends_keeps_nobody_waiting():
    s = served(by_prefix=True, n_alike=2)
    s.add(ask("same", [1, 1, 50]))
    s.add(ask("late", [1, 1, 90]))
    s.add(ask("other", [2, 2, 3]))
    order = []
    for i in range(40):
        s.add(ask(f"n{i}", [1, 1, i]))
        order += ids(s.step().admitted)
    # What was there when the group's turn began, and then the next in line.
    assert order.index("other") < order.index("n3") and order.index("late") < order.index("other")


def test_one_waits_for_what_is_being_computed_and_then_finds_it():
    head = list(range(40))
    counts = {}
    for by_prefix in (False, True):
        s = served(3, finds=True, by_prefix=by_prefix, n_alike=4, n_batch=20, n_chunk=15)
        s.add(ask("a", [*head, 50]))
        s.add(ask("b", [*head, 60]))
        s.add(ask("c", [70, 71, 72]))
        s.run(50)
        counts[by_prefix] = s.n_computed
        if by_prefix:
            assert s.ended["b", 0].n_cached == 40
            assert [ids(p.admitted) for p in s.plans[:4]] == [["a", "c"], [], [], ["b"]]
    assert counts == {False: 2 * 42 + 4, True: 42 + 2 + 4}


def test_nobody_waits_for_what_it_may_not_use_or_would_hardly_gain_from():
    head = list(range(6))
    s = served(5, finds=True, by_prefix=True, n_alike=4, n_batch=20)
    s.add(ask("a", [*head, 50, 51]))
    s.add(ask("salted", [*head, 60, 61], salt=b"x"))
    s.add(ask("proud", [*head, 61], cache=False))
    s.add(ask("short", [*head[:3], 61, 62, 63]))
    s.add(ask("alike", [*head, 62]))
    assert ids(s.step().admitted) == ["a", "proud", "salted"]  # 20 tokens
    assert ids(s.step().admitted) == ["alike", "short"]


def test_a_long_queue_that_waits_for_one_prompt_is_not_asked_about_at_every_step():
    head = list(range(60))
    s = served(4, finds=True, by_prefix=True, n_alike=4, n_batch=8)
    for i in range(100):
        s.add(ask(f"r{i}", [*head, i % 90, i]))
    asked = []
    for _ in range(7):  # while the first one's prompt is read
        before = s.space.n_hits
        s.step()
        asked.append(s.space.n_hits - before)
    # Each one is asked about when it begins to wait, and again when what it waits for is there.
    assert max(asked) <= 4 + 16 + 1 and len(s.scheduler.running) == 1
    s.run(2000)
    assert [s.ended[f"r{i}", 0].n_cached for i in range(3)] == [0, 60, 60]
    assert not any(x.awaits for x in s.ended.values())


def test_who_was_preempted_goes_before_a_group():
    s = Served(PlainSpace(2, 6), Rules(n_batch=24, by_prefix=True, n_alike=2))
    s.add(ask("a", [1, 1, 1, 1, 1, 1, 1], 9))
    s.add(ask("b", [2, 2, 2, 2, 2, 2, 2], 9))
    while not s.step().preempted:
        pass
    s.add(ask("c", [1, 1, 3]))
    s.add(ask("d", [2, 2, 3]))
    order = []
    while s.scheduler.live:
        order += ids(s.step().admitted)
    assert order == ["b", "c", "d"]
